"""Truncates or refuses prompts that are too long. The gateway cannot do this, because it has no tokenizer."""

from __future__ import annotations

from penstock.config.rollout import PromptConfig
from penstock.errors import PromptTooLong
from penstock_rollout.metrics import RolloutMetrics


class PromptLength:
    """Applies `rollout.prompt`: the longest allowed prompt, and the treatment of longer ones."""

    def __init__(self, config: PromptConfig, max_model_len: int, metrics: RolloutMetrics) -> None:
        self.config = config
        self.max_tokens = min(config.max_tokens or max_model_len - 1, max_model_len - 1)
        self.metrics = metrics

    def fit(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ids, truncated if they are too long. Raises PromptTooLong under `overlong: filter`."""
        excess = len(token_ids) - self.max_tokens
        if excess <= 0:
            return token_ids
        if self.config.overlong == "filter":
            raise PromptTooLong(
                "messages",
                f"{len(token_ids)} tokens are more than {self.max_tokens}; see rollout.prompt",
            )
        self.metrics.prompts_truncated.inc()
        if self.config.overlong == "truncate_left":
            return token_ids[excess:]
        if self.config.overlong == "truncate_right":
            return token_ids[:-excess]
        half = self.max_tokens // 2
        return token_ids[: self.max_tokens - half] + token_ids[len(token_ids) - half :]
