"""The program of a run's steps, GRPO, PPO, or functions of a user's file (`learner.step`, `learner.ahead`), and the
stages that steps are made of."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config.algorithms import AlgorithmConfig, LossConfig, ValueLossConfig
from penstock.config.learner import LearnerConfig, RewardModelConfig
from penstock.errors import ConfigError, PenstockError, one_line
from penstock.trajectory import Group
from penstock.user_code import load_callable
from penstock_learner.algorithms.advantages import (
    AdvantageInputs,
    compute_advantages,
    overlong_penalty,
    place_on_last_token,
)
from penstock_learner.algorithms.aggregation import Denominators, apply_mask, segment_sum
from penstock_learner.algorithms.losses import kl_penalty, penalize_rewards
from penstock_learner.batches.partition import unpermute
from penstock_learner.batches.sequence_batch import REWARD_PART, SequenceBatch, batch_of, token_ranges, unsampled_batch
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.roles.role_group import RoleGroup, RoleRecovery, gather_all
from penstock_learner.steps.roles import (
    Ahead,
    AheadBatch,
    BatchContext,
    Calls,
    Role,
    RoleAccess,
    Roles,
    Step,
    StepContext,
    Update,
    gather_fields,
)
from penstock_learner.steps.step_result import (
    SkippedSteps,
    StepResult,
    batch_numbers,
    listed,
    numbers_of_updates,
    ratio_counts,
)
from penstock_learner.term import Term

logger = logging.getLogger(__name__)


def with_advantages(batch: SequenceBatch, config: AlgorithmConfig, kl_coefficient: float) -> SequenceBatch:
    """The batch with `advantages`, the estimator's loss mask, and `returns` if the estimator computes them."""
    mask = torch.as_tensor(batch.loss_mask).bool()
    sequence_ids = torch.as_tensor(batch.sequence_ids)
    is_drawn = None if batch.is_baseline is None else ~torch.as_tensor(batch.is_baseline)[sequence_ids]
    if is_drawn is not None and not config.advantage.has_baseline:
        mask = mask & is_drawn  # another config left greedy samples in the groups, which are not members of them
    rewards = torch.as_tensor(batch.rewards)
    if config.overlong is not None:
        rewards = rewards + overlong_penalty(torch.as_tensor(batch.response_lengths), config.overlong)
    token_rewards = place_rewards(rewards, batch.token_rewards, mask, sequence_ids)
    if config.kl.in_reward:
        current = batch.behaviour_log_probs if batch.old_log_probs is None else batch.old_log_probs
        assert batch.reference_log_probs is not None
        reference = torch.as_tensor(batch.reference_log_probs)
        # A greedy sample is not drawn from the policy, so its log-probs do not estimate a KL: its reward stays.
        penalized = mask if is_drawn is None else mask & is_drawn
        penalty = kl_penalty(torch.as_tensor(current), reference, penalized, config.kl.penalty)
        token_rewards = penalize_rewards(token_rewards, penalty, kl_coefficient)
    inputs = AdvantageInputs(
        token_rewards,
        mask,
        sequence_ids,
        torch.as_tensor(batch.group_ids),
        values=None if batch.values is None else torch.as_tensor(batch.values).to(token_rewards.dtype),
        is_greedy=None if batch.is_baseline is None else torch.as_tensor(batch.is_baseline),
        reward_parts={key: torch.as_tensor(batch[REWARD_PART + key]) for key in config.advantage.reward_keys},
        episodes=None if batch.episodes is None else torch.as_tensor(batch.episodes),
    )
    outputs = compute_advantages(inputs, config.advantage)
    return replace(
        batch,
        advantages=outputs.advantages.numpy().astype(np.float32),
        loss_mask=outputs.loss_mask.numpy().astype(np.uint8),
        returns=None if outputs.returns is None else outputs.returns.numpy().astype(np.float32),
    )


def place_rewards(
    rewards: torch.Tensor, of_tokens: NDArray[np.float32] | None, mask: torch.Tensor, sequence_ids: torch.Tensor
) -> torch.Tensor:
    """[T] the rewards of the tokens that have their own. The rest of each sequence's reward is at its last trained
    token, so that the sum over a sequence is its reward."""
    if of_tokens is None:
        return place_on_last_token(rewards, mask, sequence_ids)
    own = apply_mask(torch.as_tensor(of_tokens), mask).double()  # equal rewards stay equal in the sum
    rest = rewards - segment_sum(own, sequence_ids, rewards.shape[0])
    return own + place_on_last_token(rest, mask, sequence_ids)


def denominators_of(batch: SequenceBatch, loss: LossConfig | ValueLossConfig) -> Denominators:
    """The counts that the loss of the whole batch is divided by, on every rank, if the loss is this one."""
    mask, sequence_ids = torch.as_tensor(batch.loss_mask), torch.as_tensor(batch.sequence_ids)
    return Denominators.of(mask, sequence_ids, loss.constant_length)


async def own_ahead(batch: SequenceBatch, roles: Roles, context: BatchContext) -> SequenceBatch:
    """The reward model's scores and the reference's log-probs, at the same time, of the roles that the run has."""
    scored_by = context.config.reward_model
    computed = await gather_fields(
        rewards=combined_rewards(batch, roles.reward_model, context, scored_by) if scored_by is not None else None,
        reference_log_probs=roles.reference.log_probs(batch) if "reference" in roles else None,
    )
    rewards = computed.pop("rewards", batch.rewards)
    if batch.token_rewards is not None and scored_by is not None and scored_by.combine == "replace":
        replaced = np.isin(batch.sequence_ids, scored_sequences(context, scored_by))
        computed["token_rewards"] = np.where(replaced, 0, batch.token_rewards)
    return batch.with_sequence_fields(rewards=rewards).with_token_fields(**computed)


def scored_sequences(context: BatchContext, config: RewardModelConfig) -> list[int]:
    return [i for i, source in enumerate(context.data_sources) if config.scores_source(source)]


def combined(
    rewards: NDArray[np.float32], scores: NDArray[np.float32], config: RewardModelConfig
) -> NDArray[np.float32]:
    """[S] rewards of the rollout servers, combined with the reward model's scores of the same sequences."""
    return (rewards if config.combine == "add" else np.zeros_like(rewards)) + np.float32(config.coefficient) * scores


async def combined_rewards(
    batch: SequenceBatch, reward_model: Role, context: BatchContext, config: RewardModelConfig
) -> NDArray[np.float32]:
    """[S] the batch's rewards, combined with the reward model's for the data sources that it scores."""
    scored = scored_sequences(context, config)
    rewards = batch.rewards.copy()
    if scored:
        rewards[scored] = combined(rewards[scored], await reward_model.scores(batch.select(scored)), config)
        if bad := sorted({int(batch.group_ids[i]) for i in scored if not np.isfinite(rewards[i])}):
            logger.error(
                "the reward model's scores of prompts %s are not finite, so the step will be skipped; check "
                "learner.reward_model.path", listed(bad),
            )  # fmt: skip
    return rewards


async def log_probs_before(policy: Role, batch: SequenceBatch, context: StepContext) -> NDArray[np.float32]:
    """[T] the log-probs of the policy from before the step, NaN for the sequences of the first update, which computes
    its own."""
    own = context.first_update(batch)
    if not len(own):
        computed: NDArray[np.float32] = await policy.log_probs(batch)
        return computed
    others = np.setdiff1d(np.arange(batch.num_sequences), own)
    found = np.full(int(batch.response_lengths.sum()), np.nan, dtype=np.float32)
    if len(others):
        found[_tokens_of(batch, others)] = await policy.log_probs(batch.select(others.tolist()))
    return found


def with_own_log_probs(batch: SequenceBatch, updates: Sequence[Update], context: StepContext) -> SequenceBatch:
    """The batch with the log-probs that its first update has computed, in place of NaN."""
    own = context.first_update(batch)
    if not len(own) or batch.old_log_probs is None:
        return batch
    found, first = batch.old_log_probs.copy(), updates[0]
    found[_tokens_of(batch, own)] = unpermute([report.proximal for report in first.reports], first.shards, first.batch)
    return replace(batch, old_log_probs=found)


def _tokens_of(batch: SequenceBatch, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
    lengths = batch.response_lengths
    return token_ranges((np.cumsum(lengths) - lengths)[sequences], lengths[sequences])


async def update_policy(policy: Role, parts: Sequence[SequenceBatch], context: StepContext) -> list[Update]:
    """One optimizer step of the policy for each part, one after another. The parts need `advantages`, `old_log_probs`
    if the correction recomputes them and there is more than one update, and `reference_log_probs` if the KL penalty is
    in the loss. The first part may lack `old_log_probs`, or have NaN."""
    _require("advantages", parts)
    if context.algorithm.correction.recomputes:
        _require("old_log_probs", parts[1:])
    given = parts[0].old_log_probs
    if given is not None and np.isnan(given).any():
        parts = [replace(parts[0], old_log_probs=None), *parts[1:]]
    if context.algorithm.kl.in_loss:
        _require("reference_log_probs", parts)
    loss = context.algorithm.loss
    settings = (context.step, context.version, context.kl_coefficient)
    return [await policy.update(part, denominators_of(part, loss), *settings) for part in parts]


async def update_critic(critic: Role, parts: Sequence[SequenceBatch], context: StepContext) -> list[Update]:
    """One optimizer step of a critic for each part, one after another. The parts need `values` and `returns`."""
    _require("values", parts)
    _require("returns", parts)
    loss = context.algorithm.value_loss
    return [await critic.update(part, denominators_of(part, loss), context.step) for part in parts]


def proximal_log_probs(batch: SequenceBatch, updates: Sequence[Update]) -> NDArray[np.float32] | None:
    """[T] the policy's log-probs of the batch before its updates: those in the batch, or what its only update
    has computed. None if no pass gave them for every token."""
    if batch.old_log_probs is not None:
        return batch.old_log_probs
    of_policy = [update for update in updates if update.role == "policy"]
    if len(of_policy) != 1 or not of_policy[0].batch.has_sequences_of(batch):
        return None
    (update,) = of_policy
    parts = [report.proximal for report in update.reports]
    return None if any(part is None for part in parts) else unpermute(parts, update.shards, batch)


def _require(name: str, parts: Sequence[SequenceBatch]) -> None:
    """Raise ValueError, which lists the fields that there are, if a part lacks this one."""
    for part in parts:
        part[name]


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
        is_shared = context.config.training_of("critic") is context.config
        own = parts if is_shared else context.minibatches(batch, "critic")
        training.append(update_critic(critic, own, context))
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
    step: Step = _load(config.step, "learner.step") if config.step else own_step
    ahead: Ahead = _load(config.ahead, "learner.ahead") if config.ahead else own_ahead
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
        raise ConfigError(
            f"{name} failed: {type(error).__name__}: {one_line(error)} ({place.filename}:{place.lineno}); "
            "correct it and start the learner again, which continues from its checkpoint"
        ) from error


def _same_sequences(result: Any, batch: SequenceBatch, name: str) -> SequenceBatch:
    if not isinstance(result, SequenceBatch):
        raise ConfigError(f"{name} must return a batch, not a {type(result).__name__}")
    if result.num_sequences != batch.num_sequences:
        raise ConfigError(
            f"{name} returned {result.num_sequences} of {batch.num_sequences} sequences; return all of them, and train "
            "a part by calling update with a selection"
        )
    if not result.has_sequences_of(batch):
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
        frozen = Roles(self.roles, self.access, with_trained=False)
        scores: NDArray[np.float32] = await frozen.reward_model.scores(batch_of(groups, with_experts=False))
        return scores

    async def run(
        self, groups: Sequence[Group], step: int, term: Term, ahead: Awaitable[SequenceBatch] | None = None
    ) -> StepResult:
        """Train the weights of the term on the groups. The policy then holds new weights, not yet published. `ahead` is
        an earlier call to `ahead`."""
        started = time.monotonic()
        computing = asyncio.ensure_future(ahead or self.ahead(groups))
        kl_coefficient = term.kl.coefficient
        context = StepContext(self.config, groups, step, term.policy_version, kl_coefficient, AheadBatch(computing))
        roles = Roles(self.roles, self.access)
        batch = self._batch_of(groups)
        batch, own = await self.program.run_step(batch, roles, context)
        roles.calls.raise_if_unfinished(self.program.step_name)
        await computing  # its error counts, even if the step caught it
        ended = time.monotonic()
        self._observe(roles.calls, step)
        update_started = roles.calls.update_started or ended
        update, others = numbers_of_updates(roles.calls.updates, batch, self.config.algorithm, kl_coefficient)
        numbers, of_batch = batch_numbers(batch, groups, term)
        return StepResult(
            step=step,
            batch=numbers,
            update=update,
            others=MappingProxyType({**own, **of_batch, **others}),
            forward_s=update_started - started,
            update_s=ended - update_started,
            ended_s=time.time(),
            rewards=batch.rewards,
            recomputed=proximal_log_probs(batch, roles.calls.updates),
        )

    async def rehearse(self, num_samples: int, max_tokens: int, vocabulary: int, is_needed: Callable[[], bool]) -> int:
        """Compile what a step runs on policy and critic, form by form. Returns the number of batches. Forms with
        sequences beyond `max_tokens` are skipped. It ends early if `is_needed` says no before a batch: there is
        something to train on. Weights, optimizers and random numbers stay as they are."""
        algorithm, access, done = self.config.algorithm, self.access, 0
        losses: dict[str, LossConfig | ValueLossConfig] = {"policy": algorithm.loss, "critic": algorithm.value_loss}
        for form, second in _forms(num_samples > 1 and "policy" in access.prefix_sharing, max_tokens):
            if not is_needed():
                break
            calls = []
            for role in (self.roles[name] for name in losses if name in access.trained):
                batch = rehearsal_batch(form, second, 2 * role.num_ranks, num_samples, vocabulary)
                shards, num_sharing = access.shards(role.name, role.num_ranks, batch)
                denominators = denominators_of(batch, losses[role.name])
                of_ranks = [(shard, denominators) for shard in shards for _ in range(num_sharing)]
                calls.append(role.call_each("rehearse", of_ranks))
            await gather_all(*calls)
            done += 1
        logger.info("compiled with %d batches of random tokens", done)
        return done

    def _batch_of(self, groups: Sequence[Group]) -> SequenceBatch:
        keys = self.config.algorithm.advantage.reward_keys
        return batch_of(groups, with_experts=self.config.router.replay, reward_keys=keys)

    def _observe(self, calls: Calls, step: int) -> None:
        """Count the step's updates. Raises TrainingDiverged if too many in a row were skipped."""
        for update in calls.updates:
            self.skipped.check(update, step)
        for update in calls.updates:
            if update.role == "policy" and not update.reports[0].step.skipped:  # the counter would stay NaN forever
                self.metrics.importance_ratio.add(*ratio_counts(update.reports))


MIXED, LONG, EQUAL = "mixed lengths", "long prompts", "equal lengths"
_SIZES = {MIXED: ((48, 64), (80, 96)), LONG: ((560, 288), (592, 320)), EQUAL: ((1, 64), (1, 80))}
"""Tokens of the prompt and of the longest response, in the two batches of each form."""


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
    zeros = np.zeros(int(responses.sum()), dtype=np.float32)
    prompt_lengths = np.full(num_sequences, prompt, dtype=np.int64)
    groups = np.repeat(np.arange(num_groups), num_samples)
    batch = unsampled_batch(np.concatenate(tokens), responses + prompt, prompt_lengths, groups)
    return replace(batch, advantages=zeros, old_log_probs=zeros, values=zeros, returns=zeros)
