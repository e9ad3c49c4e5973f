"""An environment that says whether an answer is right, and asks again if it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock_rollout.agents.interactions import Interaction, InteractionAnswer


class Feedback(Interaction):
    """A right first answer earns 1. Every wrong answer halves the reward and repeats the question.

    `config.wrong` is put before the repeated question. The model's tokenizer must be able to encode it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._num_tries: dict[str, int] = {}

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._num_tries[instance_id] = 0

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> InteractionAnswer:
        self._num_tries[instance_id] += 1
        if messages[-1]["content"] == kwargs["ground_truth"]:
            return True, "", 0.5 ** (self._num_tries[instance_id] - 1), {"tries": self._num_tries[instance_id]}
        return False, f"{self.config.get('wrong', '')}{messages[0]['content']}", 0.0, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._num_tries.pop(instance_id, None)
