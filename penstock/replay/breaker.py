"""The circuit breaker of a rollout server: it pauses leasing while everything that the server tries fails.

Bad weights or a broken reward fail every prompt alike. Without a breaker, each prompt would use up its attempts within
seconds and go to the dead letters. The queue keeps one breaker per server, from the server's first failure to its next
success. A success is an accepted group or a finished evaluation prompt.

    closed ──(failures reach a limit)──► open ──(a success, or an operator resumes the run)──► closed

A failure is at first kept in the breaker, because nobody knows yet whether the server or the prompt is at fault. If the
server succeeds next, its failures count towards the prompts' attempts, and a prompt that has used them up is
dead-lettered. If the breaker opens, they are forgotten. So a prompt may be tried more often than `max_attempts` times
while servers fail. A prompt that fails while its server has no other one to try, or fails again while few others do,
is dead-lettered without a success.

It opens when, since the server's last success, `failures` leases failed, or `non_finite_failures` of them with the
reason `non_finite`. At least MIN_PROMPTS different prompts must have failed, and at least half as many as the server
works on, so that a few bad prompts do not open it. Then

- the server leases one prompt as a probe after `probe_s`, then after twice that time, up to MAX_WAIT_S, and at once
  whenever a new policy version is published. A probe prefers prompts that have not failed yet, and training prompts
  after a held-out prompt has failed. Its failure does not count;
- the first success closes it;
- a server that is pinned to a version answers nothing but its evaluation. After MAX_PROBES probes the evaluation is
  given up, unless another server is pinned to the same version: its prompts that wait count as finished, without
  samples.

While many prompts fail and no limit is reached, no prompt is dead-lettered. A server first leases prompts that have not
failed on it since its last success, so that one prompt does not use up its attempts before others were tried. A prompt
that was spared by MAX_SPARED breakers, while groups of other prompts were accepted between them, is treated as bad
itself: its failures count at once, and they open no breaker. An expired lease is no failure here: it tells that a
server died, not why. Neither is a failure that is final, because it concerns only its prompt.

The memory queue uses this class. lua/prelude_breaker.lua does the same on Redis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.config.service import BreakerConfig

MIN_PROMPTS = 3
MAX_SPARED = 3
MAX_PROBES = 3
MAX_WAIT_S = 60.0
NON_FINITE = "non_finite"

Verdict = Literal["counted", "kept", "spared", "opened", "given_up"]
"""What a failure means for its prompt. `counted`: it counts, and may bury the prompt. `kept`: it counts at the server's
next success. `spared`: it does not count. `opened`: it does not count, and the breaker has opened. `given_up`: it does
not count, and the prompt's evaluation ends."""


@dataclass
class Breaker:
    reason: str = ""
    """Reason of the newest failure."""
    failed_evaluation: bool = False
    """Whether the newest failure was that of a held-out prompt."""
    failures: int = 0
    non_finite: int = 0
    prompts: dict[int, int] = field(default_factory=dict)
    """Failures of each prompt since the last success. While open: the prompts that were tried, with 0."""
    due: dict[int, str] = field(default_factory=dict)
    """Prompts that are buried at the next success if they have used up their attempts, with the reason: those whose
    newest failure came while few prompts failed."""
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
            return "spared"
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
