"""What `penstock doctor` finds in the facts of a run: queue, servers, heartbeats, weights, log-probs, rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.config.learner import TYPICAL_MISMATCH_NATS
from penstock.diagnosis import Finding, Level
from penstock.diagnosis.facts import RunFacts
from penstock.diagnosis.progress import learning_finding, speed_finding

FAILED_RATIO = "reward_failed_ratio"


def run_findings(facts: RunFacts, dead_letter_reasons: Mapping[str, int]) -> list[Finding]:
    """Findings about the run's queue, servers, components and policies."""
    return [
        _conservation(facts), *_admission(facts), *_pause(facts), *_breakers(facts), *_rewards(facts),
        learning_finding(facts), speed_finding(facts), *_restarts(facts), _dead_letters(facts, dead_letter_reasons),
        *_heartbeats(facts), *_weights(facts), _agreement(facts), *_quarantines(facts),
    ]  # fmt: skip


def _conservation(facts: RunFacts) -> Finding:
    if error := facts.stat.conservation_error:
        return Finding("conservation", "fail", f"off by {error}", "see docs/runbooks.md#conservationbroken")
    return Finding("conservation", "ok", "every admitted group is accounted for")


def _admission(facts: RunFacts) -> Iterator[Finding]:
    """Name a run that can never complete its next batch: too few groups are on their way, and none may be admitted."""
    stat, groups_per_step = facts.stat, facts.config.replay.groups_per_step
    if stat.admission_room > 0 or stat.queued + stat.in_flight >= groups_per_step:
        return
    text = f"no prompt can be admitted, and {stat.queued + stat.in_flight} of {groups_per_step} groups are on their way"
    if stat.step < stat.committed_step:
        text += f": the learner is at step {stat.step}, below the committed step {stat.committed_step}"
    advice = "start the learner from its newest checkpoint, or see docs/learner.md#rewinding-to-a-checkpoint"
    yield Finding("admission", "fail", text, advice)


def _pause(facts: RunFacts) -> Iterator[Finding]:
    if facts.orders.is_paused:
        reason = facts.pause_reason
        text = f"the run paused itself: {reason}" if reason else "an operator has paused the run"
        yield Finding("state", "fail" if reason else "warn", text, "`penstock runs resume` continues it")


def _breakers(facts: RunFacts) -> Iterator[Finding]:
    """Servers that lease nothing because everything that they tried failed."""
    for breaker in facts.breakers.values():
        text = (
            f"{breaker.server_id} leases nothing: its last {breaker.num_failures} attempts failed, the newest with "
            f"{breaker.reason}; it tries one prompt in {breaker.probe_in_s:.0f} s"
        )
        yield Finding("leasing", "fail", text, "see docs/runbooks.md#leasingpaused")
    if not facts.breakers:
        yield Finding("leasing", "ok", "no server is paused by failures")


def _rewards(facts: RunFacts) -> Iterator[Finding]:
    """The share of failed rewards in the newest step, and what the rollout servers report."""
    found = next((policy for policy in facts.policies if FAILED_RATIO in policy.metrics), None)
    share = 0.0 if found is None else found.metrics[FAILED_RATIO]
    failures = [notice for notice in facts.notices if notice.kind == "reward_failed"]
    limit = facts.config.rollout.reward.max_failed_share or 1.0
    where = " before the first step" if found is None else f", {share:.0%} of the samples of step {found.step}"
    level: Level = "fail" if share >= limit or found is None else "warn"
    advice = "correct the reward; the traceback is in the rollout servers' logs and in `penstock status --json`"
    if share and not failures:
        yield Finding("rewards", level, f"failed{where}", advice)
    for notice in failures:
        yield Finding("rewards", level, f"{notice.count} failed{where}; the first: {notice.text}", advice)
    for notice in facts.notices:
        if notice.kind == "default_reward":
            yield Finding("rewards", "warn", notice.text, "see docs/rewards.md")
        elif notice.kind == "prompt_failed":
            text = f"{notice.count} attempts failed; the first: {notice.text}"
            yield Finding("prompts", "warn", text, "see docs/troubleshooting.md")
    if not share and not failures:
        yield Finding("rewards", "ok", "no reward has failed")


def _restarts(facts: RunFacts) -> Iterator[Finding]:
    for notice in facts.notices:
        if notice.kind == "process_restarted":
            times = "once" if notice.count == 1 else f"{notice.count} times; the first time"
            text = f"a process died {times}: {notice.text}"
            yield Finding("restarts", "warn", text, "its log says why; the kernel's log tells if memory was short")
        elif notice.kind == "server_failed":
            yield Finding("servers", "warn", notice.text, "its log has the whole traceback")
        elif notice.kind == "server_lost":
            advice = "start it again, or let `penstock runs resume` remove this notice"
            yield Finding("servers", "warn", notice.text, advice)


def _dead_letters(facts: RunFacts, reasons: Mapping[str, int]) -> Finding:
    """The share of prompts that were dead-lettered, by reason."""
    stat = facts.stat
    if not stat.dead_lettered:
        return Finding("dead letters", "ok", "no prompt was dead-lettered")
    share = stat.dead_lettered / (stat.dead_lettered + stat.inserted)
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    level: Level = "fail" if share >= (facts.config.dataset.max_buried_share or 1.0) else "warn"
    text = f"{stat.dead_lettered} prompts, {share:.0%} of those that ended, were dead-lettered ({counts})"
    return Finding("dead letters", level, text, "`penstock queue dlq` lists them")


def _heartbeats(facts: RunFacts) -> Iterator[Finding]:
    for component, age_s in facts.ages_s.items():
        if age_s <= facts.config.replay.lease_ttl_s:
            yield Finding("heartbeat", "ok", f"{component}, {age_s:.1f} s ago")
        else:
            text = f"{component} has been silent for {age_s:.0f} s"
            yield Finding("heartbeat", "fail", text, "read its log and start it again")


def _weights(facts: RunFacts) -> Iterator[Finding]:
    """Compare the digest of each server's weights with the digest that the learner published."""
    digests = {policy.policy_version: policy.weights_digest for policy in facts.policies}
    for server in facts.serving:
        expected = digests.get(server.policy_version, "")
        if server.weights_digest and expected:
            is_same = server.weights_digest == expected
            has = "has exactly" if is_same else "has other weights than"
            text = f"{server.server_id} {has} version {server.policy_version}"
            yield Finding("weights", "ok" if is_same else "fail", text, "" if is_same else "restart the server")


def _agreement(facts: RunFacts) -> Finding:
    """The newest known value of `penstock_algo_logprob_mismatch_nats`."""
    name = "log-probs"
    found = next((policy for policy in facts.policies if "logprob_mismatch" in policy.metrics), None)
    if found is None:
        return Finding(name, "ok", "no step yet in which engine and learner can be compared")
    mismatch, typical = found.metrics["logprob_mismatch"], TYPICAL_MISMATCH_NATS[facts.config.model.dtype]
    limit = facts.config.learner.max_logprob_mismatch_nats or float("inf")
    text = f"engine and learner differ by {mismatch:.2g} nats a token (version {found.policy_version})"
    if mismatch <= min(typical, limit):
        return Finding(name, "ok", text)
    return Finding(name, "fail" if mismatch > limit else "warn", text, "see docs/runbooks.md#traininfermismatch")


def _quarantines(facts: RunFacts) -> Iterator[Finding]:
    """Servers that are kept out of training because their log-probs disagree with the learner's."""
    for held in facts.quarantines.values():
        text = (
            f"{held.server_id} differs from the learner by {held.mismatch_nats:.3g} nats a token, more than "
            f"{held.limit_nats:.3g} (version {held.policy_version}); its weights were loaded again "
            f"{held.num_reloads} times"
        )
        yield Finding("quarantine", "fail", text, "see docs/runbooks.md#serverquarantined")
    if not facts.quarantines:
        yield Finding("quarantine", "ok", "no server is in quarantine")
