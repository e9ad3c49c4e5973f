"""The program of a run's steps: GRPO, PPO, or functions of a user's file (`learner.step`, `learner.ahead`)."""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.algorithms import LossConfig, ValueLossConfig
from penstock.config.learner import LearnerConfig
from penstock.errors import ConfigError, PenstockError
from penstock.trajectory import Group
from penstock.user_code import load_callable
from penstock_learner.batches.sequence_batch import SequenceBatch, batch_of
from penstock_learner.checkpoints.trainer_state import Lineage
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.roles.role_group import RoleGroup, RoleRecovery, gather_all
from penstock_learner.steps.roles import (
    Ahead,
    AheadBatch,
    BatchContext,
    Calls,
    RoleAccess,
    Roles,
    Step,
    StepContext,
    gather_fields,
)
from penstock_learner.steps.stages import ahead as own_ahead
from penstock_learner.steps.stages import (
    denominators_of,
    log_probs_before,
    proximal_log_probs,
    update_critic,
    update_policy,
    with_advantages,
    with_own_log_probs,
)
from penstock_learner.steps.step_result import (
    SkippedSteps,
    StepResult,
    batch_metrics,
    metrics_of_updates,
    ratio_counts,
    reward_part_means,
    sample_metrics,
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
    """The result of a user's function. Its own errors become one line with the place where they were raised. The error
    of a call to a role comes first, whatever the function made of it: the controller may recover from it."""
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


class TrainingStep:
    """Trains the roles on one batch after another. Knows nothing of queues, checkpoints or publication."""

    def __init__(
        self, config: LearnerConfig, roles: Mapping[str, RoleGroup], trained: Sequence[str], recovery: RoleRecovery,
        metrics: LearnerMetrics, skipped: SkippedSteps,
    ) -> None:  # fmt: skip
        self.config = config
        self.roles = roles
        self.access = RoleAccess(config, recovery, frozenset(trained))
        self.program = load_program(config)
        self.metrics = metrics
        self.skipped = skipped

    def share_prefixes(self, roles: frozenset[str]) -> None:
        """From the next call on, these roles compute what the sequences of a group have in common once."""
        self.access = replace(self.access, prefix_sharing=roles)

    async def ahead(self, groups: Sequence[Group]) -> SequenceBatch:
        """The batch of the groups, with what frozen roles compute. It may run while earlier steps train."""
        batch = self._batch_of(groups)
        roles = Roles(self.roles, self.access, with_trained=False)
        batch = await self.program.run_ahead(batch, roles, BatchContext(self.config, groups))
        roles.calls.raise_if_unfinished(self.program.ahead_name)
        return batch

    async def policy_log_probs(self, groups: Sequence[Group]) -> NDArray[np.float32]:
        """[T] log-probs of the groups' response tokens under the policy's weights, in order."""
        log_probs: NDArray[np.float32] = await Roles(self.roles, self.access).policy.log_probs(batch_of(groups))
        return log_probs

    async def reward_model_scores(self, groups: Sequence[Group]) -> NDArray[np.float32]:
        """[S] the reward model's scores of all samples. It may run while a step trains."""
        batch = batch_of(groups, with_experts=False)
        scores: NDArray[np.float32] = await Roles(self.roles, self.access, with_trained=False).reward_model.scores(
            batch
        )
        return scores

    async def run(
        self,
        groups: Sequence[Group],
        step: int,
        version: int,
        kl_coefficient: float,
        ahead: Awaitable[SequenceBatch] | None = None,
        lineage: Lineage | None = None,
    ) -> StepResult:
        """Train on the groups. The policy then holds new weights, not yet published. `ahead` is an earlier call to
        `ahead`."""
        started = time.monotonic()
        computing = asyncio.ensure_future(ahead or self.ahead(groups))
        context = StepContext(self.config, groups, step, version, kl_coefficient, AheadBatch(computing))
        roles = Roles(self.roles, self.access)
        batch = self._batch_of(groups)
        batch, own = await self.program.run_step(batch, roles, context)
        roles.calls.raise_if_unfinished(self.program.step_name)
        await computing  # its error counts, even if the step caught it
        ended = time.monotonic()
        self._observe(roles.calls, step)
        update_started = roles.calls.update_started or ended
        numbers = {
            **own,
            "step": float(step),
            **batch_metrics(batch, version, lineage),
            **sample_metrics(groups),
            **reward_part_means(groups),
            **metrics_of_updates(roles.calls.updates, batch, self.config.algorithm, kl_coefficient),
            "forward_s": update_started - started,
            "update_s": ended - update_started,
            "time": time.time(),
        }
        return StepResult(step, numbers, batch.rewards, proximal_log_probs(batch, roles.calls.updates))

    def _batch_of(self, groups: Sequence[Group]) -> SequenceBatch:
        keys = self.config.algorithm.advantage.reward_keys
        return batch_of(groups, with_experts=self.config.router.replay, reward_keys=keys)

    def _observe(self, calls: Calls, step: int) -> None:
        """Count the step's updates. Raises TrainingDiverged if too many in a row were skipped."""
        for update in calls.updates:
            self.skipped.check(update.role, step, update.batch, update.shards, update.reports)
        for update in calls.updates:
            if update.role == "policy" and not update.reports[0].step.skipped:  # the counter would stay NaN forever
                self.metrics.importance_ratio.add(*ratio_counts(update.reports))


MIXED, LONG, EQUAL = "mixed lengths", "long prompts", "equal lengths"
_SIZES = {MIXED: ((48, 64), (80, 96)), LONG: ((560, 288), (592, 320)), EQUAL: ((1, 64), (1, 80))}
"""Tokens of the prompt and of the longest response, in the two batches of each form."""


async def rehearse(
    trained: Mapping[str, RoleGroup], access: RoleAccess, num_samples: int, max_tokens: int, vocabulary: int,
    is_needed: Callable[[], bool],
) -> int:  # fmt: skip
    """Compile what a step runs on policy and critic, form by form. Returns the number of batches. Forms with sequences
    beyond `max_tokens` are skipped. It ends early if `is_needed` says no before a batch: there is something to train
    on. Weights, optimizers and random numbers stay as they are."""
    algorithm = access.config.algorithm
    losses: dict[str, LossConfig | ValueLossConfig] = {"policy": algorithm.loss, "critic": algorithm.value_loss}
    done = 0
    for form, second in _forms(num_samples > 1 and "policy" in access.prefix_sharing, max_tokens):
        if not is_needed():
            break
        calls = []
        for role in (trained[name] for name in losses if name in trained):
            batch = rehearsal_batch(form, second, 2 * role.num_ranks, num_samples, vocabulary)
            shards, num_sharing = access.shards(role.name, role.num_ranks, batch)
            denominators = denominators_of(batch, losses[role.name])
            calls.append(
                role.call_each("rehearse", [(shard, denominators) for shard in shards for _ in range(num_sharing)])
            )
        await gather_all(*calls)
        done += 1
    return done


def _forms(shares_prefixes: bool, max_tokens: int) -> Iterator[tuple[str, int]]:
    """The forms of batches, the most frequent one first, each with the number of its batch."""
    for form in (MIXED, LONG) if shares_prefixes else (MIXED, EQUAL):
        if max(map(sum, _SIZES[form])) <= max_tokens:
            yield form, 0
            yield form, 1


def rehearsal_batch(form: str, second: int, num_groups: int, num_samples: int, vocabulary: int) -> SequenceBatch:
    """Groups of random tokens with a common prompt. Every size of the second batch differs from the first's."""
    prompt, longest = _SIZES[form][second]
    random = np.random.default_rng(second)
    num_groups += second
    num_sequences = num_groups * num_samples
    responses = np.full(num_sequences, longest, dtype=np.int64)
    if form != EQUAL:
        responses -= np.arange(num_sequences) % 8 * 3
    prompts = random.integers(0, vocabulary, (num_groups, prompt))
    tokens = [
        np.concatenate([prompts[index // num_samples], random.integers(0, vocabulary, size)])
        for index, size in enumerate(responses.tolist())
    ]
    num_tokens = int(responses.sum())
    zeros = np.zeros(num_tokens, dtype=np.float32)
    return SequenceBatch(
        token_ids=np.concatenate(tokens),
        lengths=responses + prompt,
        prompt_lengths=np.full(num_sequences, prompt, dtype=np.int64),
        rewards=np.zeros(num_sequences, dtype=np.float32),
        group_ids=np.repeat(np.arange(num_groups), num_samples),
        loss_mask=np.ones(num_tokens, dtype=np.uint8),
        behaviour_log_probs=zeros,
        token_versions=np.zeros(num_tokens, dtype=np.int64),
        temperatures=np.ones(num_tokens, dtype=np.float32),
        advantages=zeros,
        old_log_probs=zeros,
        values=zeros,
        returns=zeros,
    )
