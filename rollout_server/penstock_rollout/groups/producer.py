"""The producer leases prompts, makes groups from them and appends the groups to the queue.

`server.py` lists the loops and what each waits for.

A group takes a place for as long as all its samples run. As they end, the group gives parts of its place back, so one
slow sample does not keep the rows of its siblings idle. A group whose samples have all ended takes a whole place again,
until it is scored and appended: a slow reward or a full queue must stop the leasing.

Invariants: a leased prompt is in `_leases` until its group is accepted or the prompt is given back. An accepted group
is in `_outbox` until the queue says that it was committed, dead-lettered or superseded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from penstock.cancellation import end_task
from penstock.codec import check_group, decode_prompt, encode_group
from penstock.config.learner import RewardModelConfig
from penstock.config.rollout import AdaptiveConcurrencyConfig, RolloutConfig
from penstock.config.service import ReplayConfig
from penstock.errors import (
    DeadlineExceeded,
    PenstockError,
    PoisonGroup,
    PromptTooLong,
    QueueFull,
    Unavailable,
    first_error,
)
from penstock.logs import bind
from penstock.replay.queue import GroupProducer, answer_all
from penstock.replay.queue_types import ALL_PROMPTS, AppendOutcome, FinishedGroup, Lease, is_numbered
from penstock.sample_scores import parts_by_name
from penstock.store.notices import Event, PostEvent, ignore_event
from penstock.store.redis_client import EXCHANGES_AT_ONCE
from penstock.tracing import Tracing
from penstock.trajectory import Group, Prompt, Trajectory
from penstock_rollout.agents.episode import Episode, combine_rewards, token_rewards_of
from penstock_rollout.agents.loops import Agents
from penstock_rollout.agents.saved_samples import SampleProgress, SavedSample, TokenSaver
from penstock_rollout.agents.transcript import AgentContext, AgentLoop
from penstock_rollout.engines.engine import Engine, EngineStats
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.function import SampleScore, place_scores
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.tokenization import Tokenization

logger = logging.getLogger(__name__)
OBSERVE_S = 1.0
RISE = 1 / 16
RISE_FROM_IDLE = 1 / 4
LEAST_SHARE = 0.5
"""The limit falls at most to this share of the running groups at once."""
RESERVE = 0.5
"""Number of waiting requests, per running request, that keeps the engine full."""


class ConcurrencyLimit:
    """Limits how many groups a server works on at once, according to the load of its engine. `limit` is between 1 and
    `maximum` and starts at `maximum`. It is a pure state machine; times are seconds of any monotonic clock.

    A request that waits inside the engine only ages its lease. But the samples of a group end one by one, and a new
    group starts only when as many samples of others have ended as it has, so an engine without waiting requests soon
    has idle rows. The limit therefore lets RESERVE requests wait for each request that runs. Beyond that it follows the
    load:

    - It falls by the share of waiting requests if some wait and the KV cache is full: running ones are then preempted.
    - It falls by the share of excess requests if more than the reserve wait for `max_queue_s` without a break.
    - It rises if at most half the reserve waits, the cache has room, and as many groups run as the limit allows: by a
      sixteenth per second, or by a quarter while nothing waits. After a burst, groups that started together have twice
      as many samples in the engine as later, and the limit that fell for it is too low once they have spread out.

    The limit falls by half at most, and not again until the engine has had `max_queue_s` to show the effect."""

    def __init__(self, config: AdaptiveConcurrencyConfig, maximum: int) -> None:
        self.config = config
        self.maximum = maximum
        self.limit = maximum
        self._observed_at = -math.inf
        self._waiting_since = math.inf
        self._fell_at = -math.inf

    def observe(self, now_s: float, stats: EngineStats, running_groups: int) -> int:
        """Adapt the limit to the engine's load, at most once per OBSERVE_S, and return it."""
        if not self.config.enabled or now_s - self._observed_at < OBSERVE_S:
            return self.limit
        self._observed_at = now_s
        is_full = stats.waiting_requests > 0 and stats.kv_cache_usage >= self.config.max_kv_usage
        reserve = 0.0 if is_full else RESERVE * stats.running_requests
        if stats.waiting_requests <= reserve:
            self._waiting_since = math.inf
            has_room = stats.kv_cache_usage < self.config.max_kv_usage
            if stats.waiting_requests <= reserve / 2 and running_groups >= self.limit and has_room:
                rise = RISE if stats.waiting_requests else RISE_FROM_IDLE
                self.limit = min(self.maximum, self.limit + max(1, int(self.limit * rise)))
            return self.limit
        self._waiting_since = min(self._waiting_since, now_s)
        has_queued = now_s - self._waiting_since >= self.config.max_queue_s
        if (has_queued or is_full) and now_s - self._fell_at >= self.config.max_queue_s:
            share = (stats.running_requests + reserve) / (stats.running_requests + stats.waiting_requests)
            groups = min(self.limit, max(1, running_groups))
            self.limit = max(1, math.ceil(groups * max(share, LEAST_SHARE)))
            self._fell_at = now_s
        return self.limit


class SampleAborted(PenstockError):
    """The engine ended a sample before it was finished."""


WAIT_S = 0.5
"""Longest wait for a signal that there are prompts. A lost signal costs no more than this."""
GATHER_S = 0.02
"""Pause after the signal, so that prompts that come shortly after each other are leased together."""
NOT_READY_POLL_S = 0.05
"""How often a server that may not lease checks whether it may again."""
FULL_POLL_S = 1.0
"""How often a full server checks its concurrency limit, which may have risen."""
RECONCILE_S = 2.0
RETRY_S = 0.5
LAST_APPEND_S = 5.0
"""How long a server that ends waits for finished groups to be appended, and for samples to be handed over. Short,
because a spot machine has 30 s."""
CONTINUABLE = (TimeoutError, DeadlineExceeded, Unavailable, SampleAborted)
"""Failures after which the samples are continued. After any other, such as a broken reward, the prompt starts again."""


@dataclass(eq=False)
class Producer:
    """Turns leased prompts into groups, up to a limit at a time."""

    queue: GroupProducer
    server_id: str
    maker: GroupMaker
    rollout: RolloutConfig
    replay: ReplayConfig
    metrics: RolloutMetrics
    may_lease: Callable[[], bool]
    """Called before every lease: whether this server serves a version that training wants."""
    engine_stats: Callable[[], EngineStats] | None = None
    """Feeds the adaptive concurrency limit. Without it the limit stays at `max_concurrent_groups`."""
    tracing: Tracing = field(default_factory=Tracing)
    post: PostEvent = ignore_event
    """Tells the run's users why prompts fail."""
    reward_model: RewardModelConfig | None = None
    """The learner's, for which groups of evaluations are kept."""
    validation_samples: int = 0
    """Samples of an evaluation that are kept for their text (`learner.samples`)."""
    saver: TokenSaver | None = None
    """The maker's. It hands samples over when the server ends."""

    def __post_init__(self) -> None:
        self.appender = GroupAppender(self.queue)
        self.concurrency = ConcurrencyLimit(self.rollout.adaptive_concurrency, self.rollout.max_concurrent_groups)
        self._leases: dict[int, Lease] = {}
        self._leasing: asyncio.Task[list[Lease]] | None = None
        """The call of the queue whose answer was not read yet."""
        self._occupied: dict[int, float] = {}
        """The part of a place that each leased prompt takes; 1 if it is not in here."""
        self._workers: dict[int, asyncio.Task[None]] = {}
        self._appending: set[int] = set()
        self._outbox: dict[int, FinishedGroup] = {}
        self._place_freed = asyncio.Event()
        self._is_paused = False
        """Whether a failure of this server has opened its breaker, and no prompt has succeeded since."""

    @property
    def num_running(self) -> int:
        return len(self._leases)

    async def lease_loop(self) -> None:
        self.metrics.inflight.set_function(lambda: len(self._leases))
        self.metrics.concurrency_limit.set_function(lambda: self.concurrency.limit)
        self.metrics.outbox.set_function(lambda: len(self._outbox))
        while True:
            num_places = self._num_places()
            if self.engine_stats is not None:
                self.concurrency.observe(time.monotonic(), self.engine_stats(), math.ceil(num_places))
            free = int(self.concurrency.limit - num_places)
            if free <= 0:
                self._place_freed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._place_freed.wait(), FULL_POLL_S)
            elif not self.may_lease():
                await asyncio.sleep(NOT_READY_POLL_S)
            else:
                try:
                    await self._lease(free)
                except (QueueFull, Unavailable) as error:
                    logger.warning("cannot lease prompts yet: %s", error)
                    await asyncio.sleep(RETRY_S)

    async def _lease(self, free: int) -> None:
        """Lease up to `free` prompts and start their work. Without prompts, wait until there may be some."""
        self._leasing = asyncio.create_task(self.queue.lease(self.server_id, free))
        leases = await asyncio.shield(self._leasing)  # if the server ends now, `drain` reads the answer
        self._leasing = None
        for lease in leases:
            self._leases[lease.prompt_id] = lease
            task = asyncio.create_task(self._work(lease), name=f"prompt-{lease.prompt_id}")
            self._workers[lease.prompt_id] = task
        if leases:
            await asyncio.sleep(0)
        else:
            await self.queue.wait_for_prompts(WAIT_S)
            await asyncio.sleep(GATHER_S)

    def _num_places(self) -> float:
        """How many places the leased prompts take. Rounded, because it is a sum of parts."""
        return round(sum(self._occupied.get(prompt_id, 1.0) for prompt_id in self._leases), 6)

    def _note_running(self, lease: Lease, num_running: int, num_samples: int) -> None:
        if self._leases.get(lease.prompt_id) is lease:
            self._occupied[lease.prompt_id] = num_running / num_samples if num_running else 1.0
            self._place_freed.set()

    async def heartbeat_loop(self) -> None:
        """Renew the leases, and stop working on prompts whose lease was lost. A group that is being appended is left
        alone: its lease may be gone because the group was just accepted."""
        while True:
            await asyncio.sleep(self.replay.lease_ttl_s / 3)
            try:
                lost = await self.queue.heartbeat(self.server_id, list(self._leases.values()))
            except (QueueFull, Unavailable) as error:
                logger.warning("cannot renew the leases yet: %s", error)
                continue
            for prompt_id in set(lost) - self._appending:
                if lease := self._leases.get(prompt_id):
                    self._drop(lease)
                if worker := self._workers.get(prompt_id):
                    logger.warning("lost the lease of prompt %d; aborting its samples", prompt_id)
                    worker.cancel()

    async def reconcile_loop(self) -> None:
        """Drop groups that are done from the outbox, and append again the groups that Redis lost."""
        while True:
            await asyncio.sleep(RECONCILE_S)
            try:
                outbox = await self.queue.reconcile([group.lease for group in self._outbox.values()])
                for prompt_id in outbox.done:
                    self._outbox.pop(prompt_id, None)
                for prompt_id in outbox.missing:
                    logger.warning("Redis lost the group of prompt %d; appending it again", prompt_id)
                    await self.appender.append(self._outbox[prompt_id])
            except (QueueFull, Unavailable) as error:
                logger.warning("cannot reconcile the outbox yet: %s", error)

    async def drain(self) -> None:
        """Stop all work and give back every unfinished prompt. This does not count as a failed attempt. A finished
        group that is on its way to the queue gets a few seconds to arrive, and the samples that another server can
        continue deliver the tokens that they have: none are lost."""
        interrupted = self.saver is not None and await self.saver.interrupt()
        finished = [
            worker for prompt_id, worker in self._workers.items() if interrupted or prompt_id in self._appending
        ]
        if finished:
            await asyncio.wait(finished, timeout=LAST_APPEND_S)
        if self.saver is not None:
            await self.saver.flush()
        await asyncio.gather(*(end_task(worker) for worker in list(self._workers.values())))
        if self._leasing is not None:
            with contextlib.suppress(PenstockError, TimeoutError):
                for lease in await asyncio.wait_for(self._leasing, LAST_APPEND_S):
                    self._leases[lease.prompt_id] = lease
        for lease in list(self._leases.values()):
            try:
                await self.queue.give_back(self.server_id, lease)
            except (QueueFull, Unavailable):
                break
        self._leases.clear()

    async def _work(self, lease: Lease) -> None:
        started = time.monotonic()
        bind(prompt_id=lease.prompt_id, attempt=lease.attempt)
        try:
            prompt = decode_prompt(lease.payload)
            span = self.tracing.span(
                "lease", prompt.trace_parent, prompt_id=lease.prompt_id, attempt=lease.attempt, server_id=self.server_id
            )
            with span as trace_parent:
                prompt = replace(prompt, trace_parent=trace_parent)
                async with asyncio.timeout(self.rollout.prompt_timeout_s):
                    group = await self.maker.make(lease, prompt, partial(self._note_running, lease))
                if prompt.evaluation_id:
                    await self._record_evaluation(lease, prompt, group)
                else:
                    self._appending.add(lease.prompt_id)
                    await self._append(lease, group)
            self.metrics.episode_seconds.observe(time.monotonic() - started)
            self._drop(lease)
        except Exception as error:
            is_handed_over = self.saver is not None and self.saver.is_draining and isinstance(error, SampleAborted)
            if not is_handed_over:  # `drain` gives it back
                await self._give_back(lease, error)
        finally:
            self._appending.discard(lease.prompt_id)
            if self.saver is not None and self._leases.get(lease.prompt_id) is not lease:
                self.saver.end(lease)
            if asyncio.current_task() is self._workers.get(lease.prompt_id):
                del self._workers[lease.prompt_id]

    def _drop(self, lease: Lease) -> None:
        """Forget a lease, unless this server has leased the prompt again in the meantime."""
        if self._leases.get(lease.prompt_id) is lease:
            del self._leases[lease.prompt_id]
            self._occupied.pop(lease.prompt_id, None)
            self._place_freed.set()

    async def _append(self, lease: Lease, group: Group) -> None:
        """Append the group to the queue. Waits up to `replay.append_timeout_s` for room."""
        finished = FinishedGroup(lease, await asyncio.to_thread(encode_group, group), group.min_version)
        waited_from = counted_to = time.monotonic()
        while True:
            try:
                outcome = await self.appender.append(finished)
            except (QueueFull, Unavailable) as error:
                logger.warning("cannot append the group of prompt %d yet: %s", lease.prompt_id, error)
                outcome = "full"
            if outcome in ("accepted", "duplicate"):  # the first reply to our own append may have been lost
                self._outbox[lease.prompt_id] = finished
            if outcome == "accepted":
                self.metrics.produced.labels(group.data_source or "default").inc()
                self._note_success()
            if outcome != "full":
                return
            now = time.monotonic()
            self.metrics.append_wait.inc(now - counted_to)
            counted_to, waited_s = now, now - waited_from
            if waited_s > self.replay.append_timeout_s:
                raise DeadlineExceeded(f"no room in the queue for {waited_s:.0f} s; is the learner running?")
            await asyncio.sleep(RETRY_S)

    async def _record_evaluation(self, lease: Lease, prompt: Prompt, group: Group) -> None:
        rewards = [trajectory.reward for trajectory in group.trajectories]
        answers = [trajectory.answer for trajectory in group.trajectories if trajectory.answer is not None]
        is_scored = self.reward_model is not None and self.reward_model.scores_source(prompt.data_source)
        num_kept = ALL_PROMPTS if is_scored else -(-self.validation_samples // prompt.num_samples)
        await self.queue.record_evaluation(
            prompt.evaluation_id, lease, rewards, group.min_version, group.max_version, prompt.data_source,
            answers if len(answers) == len(rewards) else (), await self._kept_group(prompt, group, num_kept),
            parts_by_name([trajectory.reward_parts for trajectory in group.trajectories]), num_kept,
        )  # fmt: skip
        self._note_success()

    async def _kept_group(self, prompt: Prompt, group: Group, num_kept: int) -> bytes:
        """The encoded group of a held-out prompt if the learner may read it, else nothing."""
        if not num_kept or not is_numbered(prompt.evaluation_id):
            return b""
        # Neither texts nor scores need experts, which are large, or log-probs, which do not compress.
        bare = tuple(
            replace(trajectory, routed_experts=None, log_probs=np.zeros_like(trajectory.log_probs))
            for trajectory in group.trajectories
        )
        return await asyncio.to_thread(encode_group, replace(group, trajectories=bare))

    def _note_success(self) -> None:
        if self._is_paused:
            self._is_paused = False
            logger.info("leasing goes on: a prompt has succeeded")

    async def _give_back(self, lease: Lease, error: BaseException) -> None:
        """Return the prompt to the queue. The reason that it counts is the kind of a group that cannot be trained, else
        the kind of error. Unexpected errors log a traceback."""
        error = first_error(error)
        reason = error.reason.lower() if isinstance(error, PenstockError) else type(error).__name__
        if isinstance(error, PoisonGroup):
            reason = error.kind
        expected = isinstance(error, PenstockError | TimeoutError)
        logger.warning("prompt %d is given back: %s: %s", lease.prompt_id, reason, error, exc_info=not expected)
        self.metrics.failures.labels(reason).inc()
        self.post(Event("prompt_failed", reason, f"prompt {lease.prompt_id} failed ({reason}): {error}"))
        self._drop(lease)
        forget_saved = not isinstance(error, CONTINUABLE)
        if self.saver is not None and not forget_saved:
            await self.saver.flush()
        try:
            # The prompt would be too long, or be a session's, in every further attempt.
            is_final = isinstance(error, PromptTooLong) or reason == "session"
            was_opened = await self.queue.give_back(
                self.server_id, lease, failure=reason, is_final=is_final, num_running=len(self._leases),
                forget_saved=forget_saved,
            )  # fmt: skip
            if was_opened:
                self._is_paused = True
                logger.error(
                    "leasing pauses: no prompt succeeds on this server, the last one failed with %s (%s); no prompt "
                    "loses an attempt; correct the weights, the reward or the engine; one prompt is tried after %g s, "
                    "and whenever a new version is published; `penstock runs resume` ends the pause at once",
                    reason, error, self.replay.breaker.probe_s,
                )  # fmt: skip
        except (QueueFull, Unavailable) as refused:
            logger.warning("cannot give back prompt %d (%s); its lease will expire", lease.prompt_id, refused)


MAX_GROUPS = 64
"""Upper bound on the groups of one exchange."""


class GroupAppender:
    """Batches the appends of concurrent callers.

    At most EXCHANGES_AT_ONCE exchanges run at a time. Groups that finish meanwhile wait and share the next exchange. A
    failed exchange fails every group in it and no other."""

    def __init__(self, queue: GroupProducer) -> None:
        self.queue = queue
        self._waiting: list[tuple[FinishedGroup, asyncio.Future[AppendOutcome]]] = []
        self._senders: list[asyncio.Task[None]] = []

    async def append(self, group: FinishedGroup) -> AppendOutcome:
        """Append one group and return the queue's outcome, as `GroupProducer.append` does. Cancelling the caller does
        not take the group back: it may still be appended."""
        outcome: asyncio.Future[AppendOutcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, outcome))
        self._senders = [sender for sender in self._senders if not sender.done()]
        if len(self._senders) < EXCHANGES_AT_ONCE:
            self._senders.append(asyncio.create_task(self._send()))
        return await outcome

    async def _send(self) -> None:
        """Exchange until no group waits. No group is missed: between the last check of `_waiting` and the end of the
        task there is no await, and a group that arrives later starts a new sender."""
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_GROUPS], self._waiting[MAX_GROUPS:]
            groups, waiting = zip(*batch, strict=True)
            await answer_all(waiting, self.queue.append_many(groups))


# ── a scored group from a leased prompt ──

NoteRunning = Callable[[int, int], None]


@dataclass(eq=False)
class GroupMaker:
    """Generates all samples of a prompt at once, then scores them."""

    run: str
    server_id: str
    engine: Engine
    tokenization: Tokenization
    scorer: Scorer
    metrics: RolloutMetrics
    agents: Agents
    greedy_baseline: bool = False
    """Whether groups for training get one more sample, decoded greedily, as the baseline of the others."""
    tracing: Tracing = field(default_factory=Tracing)
    saver: TokenSaver | None = None
    """Saves the tokens of unfinished groups. None if they are not saved."""

    async def make(self, lease: Lease, prompt: Prompt, note_running: NoteRunning = lambda running, all: None) -> Group:
        """Generate and score all samples of the prompt. Cancelling this aborts the samples that still run. Samples that
        an earlier lease has finished or begun are taken over. `note_running` is called whenever a sample ends, with the
        number of samples that still run and the number of all samples."""
        bind(policy_version=self.engine.policy_version)
        agent_name = self.agents.name_of(prompt.agent_name)
        agent = self.agents.find(prompt.agent_name)
        saved = await self.saver.read(lease, prompt, self.engine.policy_version) if self.saver else {}
        contexts = self._contexts(lease, prompt, saved)
        with self.tracing.span("generate", prompt.trace_parent, policy_version=self.engine.policy_version):
            episodes = await self._episodes(agent, agent_name, contexts, note_running)
        if any(episode.is_aborted for episode in episodes):
            raise SampleAborted("a sample was aborted by the engine")
        responses = [
            self.tokenization.text(episode.token_ids[self._scored_start(episode) :].tolist()) for episode in episodes
        ]
        with self.tracing.span("reward", prompt.trace_parent, data_source=prompt.data_source):
            scores = await self.scorer.score(
                f"prompt {lease.prompt_id}", prompt.data_source, responses, prompt.ground_truth,
                prompt.extra_info, [episode.info_for_rewards for episode in episodes],
            )  # fmt: skip
        trajectories = tuple(
            self._trajectory(episode, score, is_baseline=index >= prompt.num_samples)
            for index, (episode, score) in enumerate(zip(episodes, scores, strict=True))
        )
        group = Group(
            run=self.run,
            prompt_id=lease.prompt_id,
            attempt=lease.attempt,
            server_id=self.server_id,
            data_source=prompt.data_source,
            sampling=prompt.sampling,
            prompt_token_ids=np.array(contexts[0].prompt_token_ids, dtype=np.int32),
            trajectories=trajectories,
            agent_name=agent_name,
            finished_at_ms=int(time.time() * 1000),
            trace_parent=prompt.trace_parent,
        )
        check_group(group)
        self.metrics.record_samples(
            prompt.data_source,
            turns=[episode.num_turns for episode in episodes],
            num_tokens=[len(episode.token_ids) for episode in episodes],
            version_spans=[trajectory.max_version - trajectory.min_version for trajectory in trajectories],
            num_truncated=sum(episode.finish_reason == "length" for episode in episodes),
        )
        return group

    async def _episodes(
        self, agent: AgentLoop, agent_name: str, contexts: Sequence[AgentContext], note_running: NoteRunning
    ) -> list[Episode]:
        """Run the agent once per context. A finished sample is saved at once: its siblings may be slow."""
        num_running = len(contexts)

        async def sample(context: AgentContext) -> Episode:
            nonlocal num_running
            saved = context.progress.saved if context.progress else None
            episode = saved.episode if saved and saved.episode else await agent(context)
            num_running -= 1
            note_running(num_running, len(contexts))
            is_new = saved is None or saved.episode is None
            if context.progress and is_new and isinstance(episode, Episode) and not episode.is_aborted:
                context.progress.finish(episode)
            return episode

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(sample(context)) for context in contexts]
        return [_episode(task, agent_name) for task in running]

    def _contexts(self, lease: Lease, prompt: Prompt, saved: Mapping[int, SavedSample]) -> list[AgentContext]:
        """One context per sample. They differ in request id and seed. The baseline comes last."""
        toolbox = self.agents.toolbox_for(prompt)
        prompt_ids = self.tokenization.prompt_ids(prompt, toolbox.schemas)
        seed = prompt.sampling.seed
        samplings = [
            replace(prompt.sampling, seed=None if seed is None else seed + index) for index in range(prompt.num_samples)
        ]
        if self.greedy_baseline and not prompt.evaluation_id:
            samplings.append(replace(prompt.sampling, temperature=0.0, top_p=1.0, seed=None))
        saver = self.saver if self.saver and self.saver.every_tokens else None
        return [
            AgentContext(
                engine=self.engine,
                tokenization=self.tokenization,
                request_id=f"{lease.prompt_id}.{lease.attempt}.{index}",
                prompt=prompt,
                prompt_token_ids=prompt_ids,
                sampling=sampling,
                config=self.agents.config,
                max_model_len=self.agents.max_model_len,
                toolbox=toolbox,
                parse_calls=self.agents.parse_calls,
                interactions=self.agents.interactions,
                metrics=self.metrics,
                progress=SampleProgress(saver, lease, index, saved.get(index)) if saver else None,
            )
            for index, sampling in enumerate(samplings)
        ]

    def _scored_start(self, episode: Episode) -> int:
        return episode.last_turn_start if self.agents.config.scored_text == "last_turn" else 0

    def _trajectory(self, episode: Episode, score: SampleScore, *, is_baseline: bool) -> Trajectory:
        how, start = self.agents.config.turn_rewards, self._scored_start(episode)
        ids = episode.token_ids[start:].tolist()
        placed = place_scores(
            score.placed, episode.loss_mask.tolist(), start, lambda n: len(self.tokenization.text(ids[:n]))
        )
        reward, parts = combine_rewards((score.reward, score.parts), episode, how)
        return Trajectory(
            **episode.trajectory_fields,
            reward=reward,
            reward_parts=parts,
            is_baseline=is_baseline,
            reward_failed=score.failed,
            answer=score.answer,
            token_rewards=token_rewards_of(episode, how, placed),
            server_ids=() if episode.server_ids == (self.server_id,) else episode.server_ids,
        )


def _episode(task: asyncio.Task[Episode], agent_name: str) -> Episode:
    """The agent's result. A custom agent may have cancelled itself or returned something else."""
    episode = None if task.cancelled() else task.result()
    if not isinstance(episode, Episode):
        raise PenstockError(f"agent {agent_name} returned {type(episode).__name__}; it must return an Episode")
    return episode
