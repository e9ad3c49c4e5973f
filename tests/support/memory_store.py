"""The state of MemoryReplayQueue: the data that Redis holds for one run, as plain Python objects. The property test
compares the Lua scripts with it.

The methods have the names of the functions in lua/prelude.lua.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.config.service import BreakerConfig, ReplayConfig
from penstock.replay.queue_types import Admission, FeedPosition, RunRewind, admission
from penstock.sample_scores import PromptSamples, summarise

NEVER = float("inf")


class Ordered:
    """A sorted set of ids: lowest score first, and equal scores by the id as text, as in Redis."""

    def __init__(self) -> None:
        self._scores: dict[int, float] = {}
        self._order: list[tuple[float, str, int]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: int) -> bool:
        return key in self._scores

    def score(self, key: int) -> float | None:
        return self._scores.get(key)

    def put(self, key: int, score: float) -> None:
        self.remove(key)
        self._scores[key] = score
        insort(self._order, (score, str(key), key))

    def remove(self, key: int) -> bool:
        score = self._scores.pop(key, None)
        if score is None:
            return False
        del self._order[bisect_left(self._order, (score, str(key), key))]
        return True

    def lowest(self, count: int, below: float = NEVER) -> list[int]:
        return [key for score, _, key in self._order[:count] if score < below]

    def highest(self, count: int) -> list[int]:
        return [key for _, _, key in self._order[: -count - 1 : -1]]

    @property
    def lowest_score(self) -> float:
        return self._order[0][0] if self._order else NEVER


class Signal:
    """Counts events and wakes those who wait for the next one."""

    def __init__(self) -> None:
        self.count = 0
        self._sent = asyncio.Event()

    def send(self) -> None:
        self.count += 1
        self._sent.set()
        self._sent = asyncio.Event()

    async def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until `count` is not `seen`, or for `timeout_s`; returns the count."""
        if self.count == seen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._sent.wait()
        return self.count


@dataclass
class MemoryPrompt:
    payload: bytes
    priority: int = 0
    evaluation_id: str = ""
    attempt: int = 0
    failures: int = 0
    num_refunds: int = 0
    """How many opened breakers refunded its failures."""
    refunded_at: int = -1
    """The number of accepted groups at the last of them."""
    owner: tuple[str, int] | None = None
    """Server and attempt of the lease; None if it is not leased."""
    submitted_at: float = 0.0
    saved: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Saved tokens by sample and start."""
    saved_from: set[str] = field(default_factory=set)
    """Servers that saved them."""


@dataclass(frozen=True)
class MemoryGroup:
    attempt: int
    payload: bytes
    admission: float
    min_version: int
    appended_at: float


@dataclass
class MemoryEvaluation:
    num_prompts: int
    first_id: int
    num_finished: int = 0
    num_failed: int = 0
    samples: list[PromptSamples] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: dict[int, dict[str, bytes]] = field(default_factory=dict)
    """Group and prompt by prompt id."""
    kept_until: float = 0.0
    kept_bytes: int = 0
    num_omitted: int = 0

    def keep(self, prompt_id: int, group: bytes, prompt: bytes, max_bytes: int, until: float) -> None:
        """Keep the group and its prompt for the learner, if there is room."""
        self.kept_bytes += len(group) + len(prompt)
        if self.kept_bytes <= max_bytes:
            self.kept[prompt_id], self.kept_until = {"": group, "prompt:": prompt}, until
        else:
            self.num_omitted += 1


MIN_PROMPTS = 3
MAX_REFUNDS = 3
MAX_PROBES = 3
MAX_WAIT_S = 60.0
NON_FINITE = "non_finite"

Verdict = Literal["counted", "kept", "refunded", "opened", "abandoned"]
"""What a failure means for its prompt. `counted`: it counts, and may dead-letter the prompt. `kept`: it counts at the
server's next success. `refunded`: it does not count. `opened`: it does not count, and the breaker has opened.
`abandoned`: it does not count, and the prompt's evaluation ends."""


@dataclass
class Breaker:
    """The circuit breaker of one server. penstock/replay/lua/prelude_breaker.lua has the rules."""

    reason: str = ""
    """Reason of the newest failure."""
    failed_evaluation: bool = False
    """Whether the newest failure was that of a held-out prompt."""
    failures: int = 0
    non_finite: int = 0
    prompts: dict[int, int] = field(default_factory=dict)
    """Failures of each prompt since the last success. While open: the prompts that were tried, with 0."""
    due: dict[int, str] = field(default_factory=dict)
    """Prompts that are dead-lettered at the next success if they have used up their attempts, with the reason: those
    whose newest failure came while few prompts failed."""
    max_attempts: int = 1
    is_open: bool = False
    probe_at: float = 0.0
    wait_s: float = 0.0
    policy_version: int = 0
    """The run's version at the newest probe, or when the breaker opened."""
    num_probes: int = 0

    def record_failure(
        self, config: BreakerConfig, prompt_id: int, reason: str, num_running: int, now: float, policy_version: int
    ) -> Verdict:
        self.reason = reason
        self.failures += 1
        self.non_finite += reason == NON_FINITE
        if self.is_open:
            self.prompts[prompt_id] = 0
            return "refunded"
        self.prompts[prompt_id] = self.prompts.get(prompt_id, 0) + 1
        self.due.pop(prompt_id, None)
        if len(self.prompts) < MIN_PROMPTS or 2 * len(self.prompts) < num_running:
            self.due[prompt_id] = reason
            return "kept"
        if self.failures < config.failures and self.non_finite < config.non_finite_failures:
            return "kept"
        self.is_open, self.policy_version = True, policy_version
        self.wait_s, self.probe_at = config.probe_s, now + config.probe_s
        self.prompts, self.due = dict.fromkeys(self.prompts, 0), {}
        return "opened"

    def may_probe(self, now: float, policy_version: int) -> bool:
        return now >= self.probe_at or policy_version != self.policy_version

    def record_probe(self, config: BreakerConfig, now: float, policy_version: int) -> None:
        is_new = policy_version != self.policy_version
        self.wait_s = config.probe_s if is_new else min(2 * self.wait_s, max(MAX_WAIT_S, config.probe_s))
        self.probe_at, self.policy_version = now + self.wait_s, policy_version
        self.num_probes += 1


MAX_BENCHMARKS, MAX_DETAIL_BENCHMARKS = 320, 64
MAX_SCORES, MAX_DETAIL_SCORES = 8000, 3000


class MemoryStore:
    """The data of one run. `clock` returns seconds; leases run out by it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.store_id = secrets.token_hex(8)
        self.counters: Counter[str] = Counter()
        self.prompts: dict[int, MemoryPrompt] = {}
        self.groups: dict[int, MemoryGroup] = {}
        self.submissions: dict[str, range] = {}
        self.accepted: dict[tuple[str, int], int] = {}
        """Prompt of each group that was accepted without a lease, by the key of its origin and its number."""
        self.feeds: dict[str, FeedPosition] = {}
        self.finished_step = -1
        self.evaluations: dict[str, MemoryEvaluation] = {}
        self.scores: dict[str, float] = {}
        self.score_history: dict[str, float] = {}
        self.policies: dict[int, bytes] = {}
        self.manifests: dict[int, list[int]] = {}
        self.trained: set[int] = set()
        self.kept: dict[int, dict[int, MemoryPrompt]] = {}
        """Prompts that were committed, by the step of the commit, while the run can be rewound to before it."""
        self.rewind: RunRewind | None = None
        self.dead_lettered: set[int] = set()
        self.cancelled: set[int] = set()
        self.is_paused = False
        self.breakers: dict[str, Breaker] = {}
        self.drained: set[str] = set()
        """Servers that lease nothing."""
        self.quarantined: dict[str, int] = {}
        """Prompts that a server in quarantine may still lease as probes."""
        self.pins: dict[str, int] = {}
        """Policy version by the name of a server or of an evaluation."""
        self.served_versions: dict[str, int] = {}
        """Policy version that each server has reported."""
        self.dead: list[tuple[int, str, bytes, bytes]] = []
        """Dead letters as (prompt id, reason, encoded prompt, encoded group)."""
        self.dead_reasons: Counter[str] = Counter()
        self.expired_reasons: Counter[str] = Counter()
        self.pending, self.leases, self.open = Ordered(), Ordered(), Ordered()
        self.ready, self.ready_by_version = Ordered(), Ordered()
        self.eval_pending, self.eval_leases = Ordered(), Ordered()
        self.awaited_since = 0.0
        self.returned: set[int] = set()
        self.delivered: set[int] = set()
        self.lease_signal, self.result_signal = Signal(), Signal()

    @property
    def in_flight(self) -> int:
        return len(self.leases) + len(self.returned)

    @property
    def queued(self) -> int:
        return len(self.ready) + len(self.delivered)

    @property
    def pending_age_ms(self) -> int:
        head = self.pending.lowest(1)
        return int(1000 * (self.clock() - self.prompts[head[0]].submitted_at)) if head else 0

    @property
    def ready_age_ms(self) -> int:
        head = self.ready.lowest(1)
        return int(1000 * (self.clock() - self.groups[head[0]].appended_at)) if head else 0

    def admission(self, config: ReplayConfig) -> Admission:
        """How many prompts may be admitted now."""
        return admission(
            step=self.counters["step"], trained=self.counters["trained"], queued=self.queued, in_flight=self.in_flight,
            max_staleness=config.max_staleness, groups_per_step=config.groups_per_step,
            base=self.counters["admission_base"],
        )  # fmt: skip

    def count(self, name: str, by: int = 1) -> int:
        self.counters[name] += by
        return self.counters[name]

    def add_prompts(self, payloads: Sequence[bytes], priorities: Sequence[int]) -> range:
        last = self.count("next_prompt_id", len(payloads))
        ids = range(last - len(payloads) + 1, last + 1)
        for prompt_id, payload, priority in zip(ids, payloads, priorities, strict=True):
            self.prompts[prompt_id] = MemoryPrompt(payload, priority, submitted_at=self.clock())
            self.make_pending(prompt_id)
        self.lease_signal.send()
        return ids

    def newest_durable_id(self, loss_window_s: float) -> int:
        """The newest id that may be leased: it, or a later one, has been the newest for `loss_window_s`."""
        count, now = self.counters, self.clock()
        if count["awaited_id"] > count["durable_id"] and now - self.awaited_since >= loss_window_s:
            count["durable_id"] = count["awaited_id"]
        if count["next_prompt_id"] > count["durable_id"] >= count["awaited_id"]:
            count["awaited_id"], self.awaited_since = count["next_prompt_id"], now
            if loss_window_s == 0:
                count["durable_id"] = count["next_prompt_id"]
        return count["durable_id"]

    def make_pending(self, prompt_id: int) -> None:
        self.pending.put(prompt_id, -self.prompts[prompt_id].priority * 1e12 + prompt_id)

    def make_ready(self, prompt_id: int) -> None:
        group = self.groups[prompt_id]
        self.ready.put(prompt_id, group.admission)
        self.ready_by_version.put(prompt_id, group.min_version)
        self.count("queued_bytes", len(group.payload))

    def unready(self, prompt_id: int) -> None:
        self.ready_by_version.remove(prompt_id)
        if self.ready.remove(prompt_id):
            self.count("queued_bytes", -len(self.groups[prompt_id].payload))

    def remove_group(self, prompt_id: int) -> MemoryGroup | None:
        """Remove a queued group from every place; None if there is none."""
        if prompt_id not in self.groups:
            return None
        self.unready(prompt_id)
        if prompt_id in self.delivered:
            self.delivered.remove(prompt_id)
            self._leave_manifest(prompt_id)
        self.lease_signal.send()
        return self.groups.pop(prompt_id)

    def _leave_manifest(self, prompt_id: int) -> None:
        """The prompt may be generated and taken again for a later step, and must then be in the manifest of that step
        alone."""
        kept = {step: [other for other in ids if other != prompt_id] for step, ids in self.manifests.items()}
        self.manifests = {step: ids for step, ids in kept.items() if ids}

    def quarantine(self, server_id: str, num_probes: int) -> None:
        """Put a server into quarantine. Tokens that it saved are deleted."""
        self.quarantined[server_id] = num_probes
        for prompt_id, prompt in self.prompts.items():
            if server_id in prompt.saved_from:
                self.drop_saved(prompt_id)

    def drop_saved(self, prompt_id: int) -> None:
        """Delete the saved tokens of a prompt."""
        prompt = self.prompts[prompt_id]
        self.count("saved_bytes", -sum(map(len, prompt.saved.values())))
        prompt.saved.clear()
        prompt.saved_from.clear()

    def release_admission(self, prompt_id: int) -> float:
        """Remove a prompt from every place before its group. Returns the number of its admission; a prompt without one
        is admitted now."""
        self.prompts[prompt_id].owner = None
        was_leased, was_returned = self.leases.remove(prompt_id), prompt_id in self.returned
        self.returned.discard(prompt_id)
        self.pending.remove(prompt_id)
        if not was_leased and not was_returned:
            self.count("admitted")
        number = self.open.score(prompt_id)
        self.open.remove(prompt_id)
        return number if number is not None else self.count("admission")

    def record_failure(
        self, config: BreakerConfig, server_id: str, prompt_id: int, failure: str, num_running: int, max_attempts: int
    ) -> Verdict:
        """Record a failure in the server's breaker. If that opens, it refunds the failures of its prompts."""
        prompt = self.prompts[prompt_id]
        if not config.failures or prompt.num_refunds >= MAX_REFUNDS:
            return "counted"
        breaker = self.breakers.setdefault(server_id, Breaker())
        breaker.failed_evaluation, breaker.max_attempts = prompt_id in self.eval_leases, max_attempts
        version = self.counters["policy_version"]
        verdict = breaker.record_failure(config, prompt_id, failure, num_running, self.clock(), version)
        if verdict == "opened":
            for failed in filter(None, map(self.prompts.get, breaker.prompts)):
                # While no group at all is accepted, breakers that open one after the other count once.
                failed.num_refunds += failed.refunded_at != self.counters["inserted"]
                failed.refunded_at = self.counters["inserted"]
        if prompt_id in breaker.due:
            failures = breaker.prompts[prompt_id]
            is_alone = num_running == len(self.pending) == len(self.eval_pending) == 0
            if prompt.failures + failures >= max_attempts and (failures > 1 or is_alone):
                prompt.failures += failures - 1
                breaker.prompts[prompt_id] = 0
                del breaker.due[prompt_id]
                return "counted"
        if verdict == "refunded" and self._must_abandon(server_id, breaker):
            breaker.num_probes = 0
            return "abandoned"
        return verdict

    def _must_abandon(self, server_id: str, breaker: Breaker) -> bool:
        """Whether the evaluation of a server with an open breaker has to end, because no other server answers it."""
        if not breaker.failed_evaluation or breaker.num_probes < MAX_PROBES or server_id not in self.pins:
            return False
        peers = [peer for peer in self.served_versions if peer != server_id and not self.open_breaker(peer)]
        return all(self.pins.get(peer) != self.pins[server_id] for peer in peers)

    def record_success(self, prompt_id: int) -> None:
        """Close the breaker of the server that holds the lease of the prompt. The failures that it kept count."""
        owner = self.prompts[prompt_id].owner
        breaker = self.breakers.pop(owner[0], None) if owner is not None else None
        if breaker is None:
            return
        for failed_id, failures in breaker.prompts.items():
            if failures == 0 or (prompt := self.prompts.get(failed_id)) is None:
                continue
            prompt.failures += failures
            if failed_id not in breaker.due or prompt.failures < breaker.max_attempts:
                continue
            if failed_id in self.returned:
                self.returned.discard(failed_id)
                self.pending.remove(failed_id)
                self.open.remove(failed_id)
                self.dead_letter(failed_id, breaker.due[failed_id], b"")
                self.lease_signal.send()
            elif self.eval_pending.remove(failed_id):
                self.fail_evaluation_prompt(failed_id)

    def open_breaker(self, server_id: str) -> Breaker | None:
        breaker = self.breakers.get(server_id)
        return breaker if breaker is not None and breaker.is_open else None

    def return_prompt(self, prompt_id: int, failure: str, max_attempts: float) -> None:
        """End a lease that brought no group."""
        prompt = self.prompts[prompt_id]
        prompt.owner = None
        self.leases.remove(prompt_id)
        self.lease_signal.send()
        prompt.failures += failure != ""
        if failure and prompt.failures >= max_attempts:
            self.open.remove(prompt_id)
            self.dead_letter(prompt_id, failure, b"")
            return
        self.returned.add(prompt_id)
        self.pending.put(prompt_id, -NEVER)

    def return_evaluation(self, prompt_id: int, failure: str, max_attempts: float) -> None:
        """End a lease of a held-out prompt that brought no rewards. At max_attempts the prompt has failed."""
        prompt = self.prompts[prompt_id]
        prompt.owner = None
        self.eval_leases.remove(prompt_id)
        prompt.failures += failure != ""
        if failure and prompt.failures >= max_attempts:
            self.fail_evaluation_prompt(prompt_id)
            return
        self.eval_pending.put(prompt_id, prompt_id)
        self.lease_signal.send()

    def fail_evaluation_prompt(self, prompt_id: int) -> None:
        """Count a held-out prompt as finished, without samples."""
        self.drop_saved(prompt_id)
        evaluation_id = self.prompts.pop(prompt_id).evaluation_id
        self.evaluations[evaluation_id].num_failed += 1
        self.finish_evaluation_prompt(evaluation_id)

    def abandon_evaluation(self, evaluation_id: str) -> None:
        """End an evaluation that nobody can answer."""
        for prompt_id in self.eval_pending.lowest(len(self.eval_pending)):
            if self.prompts[prompt_id].evaluation_id == evaluation_id:
                self.eval_pending.remove(prompt_id)
                self.fail_evaluation_prompt(prompt_id)

    def finish_evaluation_prompt(self, evaluation_id: str) -> None:
        """Count a finished prompt. A complete evaluation's score is kept under its benchmark, which is its id without
        the number at the end."""
        evaluation = self.evaluations[evaluation_id]
        evaluation.num_finished += 1
        if evaluation.num_finished == evaluation.num_prompts and evaluation.samples:
            benchmark = re.sub(r"-\d+$", "", evaluation_id)
            self.keep_score(benchmark, evaluation_id, summarise(evaluation.samples).mean)

    def keep_score(self, benchmark: str, numbered: str, score: float, *, is_detail: bool = False) -> None:
        """Keep the newest score of a benchmark and, under its name with a number at the end, its history. Details are
        kept while there is room that no score needs."""
        if benchmark in self.scores or len(self.scores) < (MAX_DETAIL_BENCHMARKS if is_detail else MAX_BENCHMARKS):
            self.scores[benchmark] = score
        num_digits = len(numbered) - len(benchmark) - 1
        if 0 < num_digits < 16 and len(self.score_history) < (MAX_DETAIL_SCORES if is_detail else MAX_SCORES):
            self.score_history[numbered] = score

    def dead_letter(self, prompt_id: int, reason: str, payload: bytes) -> None:
        self.drop_saved(prompt_id)
        self.dead.append((prompt_id, reason, self.prompts.pop(prompt_id).payload, payload))
        self.dead_lettered.add(prompt_id)
        self.dead_reasons[reason_label(reason)] += 1
        self.count("dead_lettered")
        self.result_signal.send()


def reason_label(reason: str) -> str:
    """The first word of a reason, which is a metric's label."""
    word = re.match(r"[A-Za-z0-9_]+", reason)
    return word.group() if word else "other"
