"""Interactions are environments that reply to the model. `rollout.agents.interactions_file` declares them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import DeadlineExceeded, InvalidInput, PenstockError
from penstock.reward_bounds import is_reward

logger = logging.getLogger(__name__)

InteractionAnswer = tuple[bool, str, float, dict[str, Any]]
"""Whether the conversation is done, the reply, the reward of the turn, and numbers to record."""


class Interaction:
    """Base class of interactions. The methods are those of verl's BaseInteraction.

    One object serves all samples of a server; `instance_id` identifies the sample. The keyword arguments are the
    prompt's `extra_info.interaction_kwargs`. Each call has the deadline `rollout.agents.tool_timeout_s`. If a call
    raises, the prompt is given back to the queue and tried again.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Prepare for a sample."""

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> InteractionAnswer:
        """Reply to the last message, which is the assistant's. If the conversation is done, the model does not see the
        reply."""
        raise NotImplementedError

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """A reward for the whole conversation, in addition to the rewards of its turns, or None."""
        return None

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Free the resources of the sample. This is always called, even after a cancellation."""


class InteractionSession:
    """The interaction of one sample, from `start_interaction` to `finalize_interaction`."""

    def __init__(
        self, interactions: Mapping[str, Interaction], instance_id: str, kwargs: Mapping[str, Any], timeout_s: float
    ) -> None:
        self._instance_id = instance_id
        self._timeout_s = timeout_s
        self._name, self._kwargs = _chosen(interactions, kwargs)
        self._interaction = interactions[self._name]

    async def __aenter__(self) -> InteractionSession:
        try:
            await self._call("start_interaction", **self._kwargs)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        try:
            await self._call("finalize_interaction", **self._kwargs)
        except PenstockError as error:
            logger.warning("%s", error)

    async def respond(self, messages: Sequence[Mapping[str, Any]]) -> InteractionAnswer:
        answer = await self._call("generate_response", messages, **self._kwargs)
        if not (isinstance(answer, tuple) and len(answer) == 4 and isinstance(answer[1], str)):
            raise PenstockError(
                f"interaction {self._name}: generate_response must return (done, feedback, reward, numbers)"
            )
        done, feedback, reward, extra = answer
        return bool(done), feedback, self._finite(reward), recordable(extra or {})

    async def final_reward(self) -> float | None:
        reward = await self._call("calculate_score", **self._kwargs)
        return None if reward is None else self._finite(reward)

    async def _call(self, method: str, *arguments: Any, **kwargs: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await getattr(self._interaction, method)(self._instance_id, *arguments, **kwargs)
        except Exception as error:
            called = f"interaction {self._name}: {method}"
            if deadline.expired():
                raise DeadlineExceeded(f"{called} took more than {self._timeout_s:g} s") from error
            raise PenstockError(f"{called} failed: {error!r}") from error

    def _finite(self, reward: Any) -> float:
        try:
            number = float(reward)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not is_reward(number):
            raise PenstockError(f"interaction {self._name}: {reward!r} is not a reward")
        return number


def _chosen(interactions: Mapping[str, Interaction], kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The interaction that `interaction_kwargs` names, or the only declared one, and the remaining arguments."""
    where = "extra_info.interaction_kwargs"
    if not interactions:
        raise InvalidInput(where, "no interaction is declared; set rollout.agents.interactions_file")
    known = ", ".join(interactions)
    name = kwargs.get("name")
    if name is None and len(interactions) > 1:
        raise InvalidInput(f"{where}.name", f"say which interaction: {known}")
    name = next(iter(interactions)) if name is None else name
    if name not in interactions:
        raise InvalidInput(f"{where}.name", f"there is no interaction {name!r}; declared: {known}")
    return str(name), {key: value for key, value in kwargs.items() if key != "name"}


def recordable(extra: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers in what a tool or interaction reports. Other values, such as texts, cannot be recorded."""
    return {
        str(key): float(value) for key, value in extra.items() if isinstance(value, int | float) and is_reward(value)
    }
