"""The program of a run's steps: GRPO, PPO, or functions of a user's file (`learner.step`, `learner.ahead`)."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.config.learner import LearnerConfig
from penstock.errors import ConfigError, PenstockError
from penstock.user_code import load_callable
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.roles.role_group import gather_all
from penstock_learner.steps.context import Ahead, BatchContext, Step, StepContext
from penstock_learner.steps.roles import Calls, Roles, gather_fields
from penstock_learner.steps.stages import ahead as own_ahead
from penstock_learner.steps.stages import (
    log_probs_before,
    update_critic,
    update_policy,
    with_advantages,
    with_own_log_probs,
)


async def own_step(batch: SequenceBatch, roles: Roles, context: StepContext) -> tuple[SequenceBatch, dict[str, float]]:
    """GRPO and every other algorithm without a critic, or PPO with one.

        a step ahead: scores, reference log-probs ┐                 ┌► policy updates
        proximal log-probs                        ├─► advantages ─► ┤
        values, with a critic                     ┘                 └► critic updates

    The entries of a column run at the same time. A policy with an adapter is its own reference: it computes the
    reference's log-probs in the step."""
    policy, critic = roles.policy, roles.critic if "critic" in roles else None
    forwards = gather_fields(
        old_log_probs=log_probs_before(policy, batch, context) if context.recomputes_log_probs else None,
        reference_log_probs=policy.reference_log_probs(batch) if context.config.policy_is_reference else None,
        values=critic.values(batch) if critic is not None else None,
    )
    batch, computed = await gather_all(context.ahead(), forwards)
    batch = batch.with_token_fields(**computed)
    batch = with_advantages(batch, context.algorithm, context.kl_coefficient)
    parts = context.minibatches(batch)
    training = [update_policy(policy, parts, context)]
    if critic is not None:
        training.append(update_critic(critic, parts, context))
    updates = (await gather_all(*training))[0]
    return with_own_log_probs(batch, updates, context), {}


PARAMETERS = ("batch", "roles", "context")


@dataclass(frozen=True)
class StepProgram:
    """The two functions of a step. Their names are for error messages."""

    step: Step
    ahead: Ahead
    step_name: str
    ahead_name: str

    async def run_ahead(self, batch: SequenceBatch, roles: Roles, context: BatchContext) -> SequenceBatch:
        """Call `ahead`. The result has the same sequences."""
        result = await _explained(self.ahead(batch, roles, context), roles.calls, self.ahead_name)
        return _same_sequences(result, batch, self.ahead_name)

    async def run_step(
        self, batch: SequenceBatch, roles: Roles, context: StepContext
    ) -> tuple[SequenceBatch, dict[str, float]]:
        """Call `step`. The batch that it returns has the same sequences."""
        result = await _explained(self.step(batch, roles, context), roles.calls, self.step_name)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ConfigError(f"{self.step_name} must return (batch, metrics), not a {type(result).__name__}")
        if not context.ahead_batch.was_read:
            raise ConfigError(f"{self.step_name} must await context.ahead(), or what runs a step ahead has no effect")
        trained, metrics = result
        try:
            numbers = {str(name): float(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.step_name} must return its metrics as a dict of numbers: {error}") from error
        return _same_sequences(trained, batch, self.step_name), numbers


def load_program(config: LearnerConfig) -> StepProgram:
    """The program that the config names. Raises ConfigError if a function cannot be loaded or called as a step."""
    step: Step = own_step
    ahead: Ahead = own_ahead
    if config.step:
        step = _load(config.step, "learner.step")
    if config.ahead:
        ahead = _load(config.ahead, "learner.ahead")
    return StepProgram(step, ahead, f"learner.step {config.step}".rstrip(), f"learner.ahead {config.ahead}".rstrip())


def _load(path: str, key: str) -> Callable[..., Awaitable[Any]]:
    function: Callable[..., Awaitable[Any]] = load_callable(path, key)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{key}: {path} is not a coroutine function; write `async def` before its name")
    try:
        inspect.signature(function).bind(*PARAMETERS)
    except TypeError as error:
        wanted = ", ".join(PARAMETERS)
        raise ConfigError(
            f"{key}: {path} cannot be called as a step ({error}); its parameters are ({wanted})"
        ) from error
    return function


async def _explained(call: Awaitable[Any], calls: Calls, name: str) -> Any:
    """The result of a user's function. Its own errors become one line with the place where they were raised.

    The error of a call to a role comes first, whatever the function made of it: the controller may recover from it."""
    try:
        return await call
    except Exception as error:
        if calls.error is not None:
            raise calls.error from error
        if isinstance(error, PenstockError):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(str(error).split())
        raise ConfigError(
            f"{name} failed: {type(error).__name__}: {message} ({place.filename}:{place.lineno}); correct it and start "
            "the learner again, which continues from its checkpoint"
        ) from error


def _same_sequences(result: Any, batch: SequenceBatch, name: str) -> SequenceBatch:
    if not isinstance(result, SequenceBatch):
        raise ConfigError(f"{name} must return a batch, not a {type(result).__name__}")
    if result.num_sequences != batch.num_sequences:
        raise ConfigError(
            f"{name} returned {result.num_sequences} of {batch.num_sequences} sequences; return all of them, and train "
            "a part by calling update with a selection"
        )
    if not np.array_equal(result.lengths, batch.lengths) or not np.array_equal(result.token_ids, batch.token_ids):
        raise ConfigError(f"{name} returned the sequences in another order, or others; return them as they were given")
    return result
