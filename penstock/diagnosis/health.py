"""What is wrong with a run, and what to do about it: pure functions of its facts. `penstock doctor` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.api.records import Finding
from penstock.config.learner import ALLOWED_MISMATCH_NATS
from penstock.diagnosis import Level, finding, paused_finding, quarantine_finding
from penstock.diagnosis.facts import RunFacts
from penstock.diagnosis.progress import learning_finding, speed_finding


def run_findings(facts: RunFacts, dead_letter_reasons: Mapping[str, int]) -> list[Finding]:
    return [
        _conservation(facts), *_admission(facts), *_pause(facts), *_breakers(facts), *_rewards(facts),
        learning_finding(facts), speed_finding(facts), *_restarts(facts), _dead_letters(facts, dead_letter_reasons),
        *_heartbeats(facts), *_weights(facts), _agreement(facts), *_quarantines(facts),
    ]  # fmt: skip


def _conservation(facts: RunFacts) -> Finding:
    if error := facts.stat.conservation_error:
        return finding("conservation", "FAIL", f"off by {error}", "see docs/runbooks.md#conservationbroken")
    return finding("conservation", "OK", "every admitted group is accounted for")


def _admission(facts: RunFacts) -> Iterator[Finding]:
    """Name a run that can never complete its next batch: too few groups are on their way, and none may be admitted."""
    stat, groups_per_step = facts.stat, facts.config.replay.groups_per_step
    if stat.admission_room > 0 or stat.queued + stat.in_flight >= groups_per_step:
        return
    text = f"no prompt can be admitted, and {stat.queued + stat.in_flight} of {groups_per_step} groups are on their way"
    if stat.step < stat.committed_step:
        text += f": the learner is at step {stat.step}, below the committed step {stat.committed_step}"
    advice = "start the learner from its newest checkpoint, or see docs/learner.md#rewinding-to-a-checkpoint"
    yield finding("admission", "FAIL", text, advice)


def _pause(facts: RunFacts) -> Iterator[Finding]:
    if facts.orders.is_paused:
        reason = facts.pause_reason
        text = f"the run paused itself: {reason}" if reason else "an operator has paused the run"
        yield finding("state", "FAIL" if reason else "WARN", text, "`penstock runs resume` continues it")


def _breakers(facts: RunFacts) -> Iterator[Finding]:
    for breaker in facts.breakers.values():
        found = paused_finding(breaker.server_id, breaker.num_failures, breaker.reason)
        yield found.model_copy(update={"text": f"{found.text}; it tries one prompt in {breaker.probe_in_s:.0f} s"})
    if not facts.breakers:
        yield finding("leasing", "OK", "no server is paused by failures")


def _rewards(facts: RunFacts) -> Iterator[Finding]:
    """The share of failed rewards in the newest step, and what the rollout servers report."""
    found = next((policy for policy in facts.policies if "reward_failed_ratio" in policy.metrics), None)
    share = 0.0 if found is None else found.metrics["reward_failed_ratio"]
    failures = [notice for notice in facts.notices if notice.kind == "reward_failed"]
    limit = facts.config.rollout.reward.max_failed_share or 1.0
    where = " before the first step" if found is None else f", {share:.0%} of the samples of step {found.step}"
    level: Level = "FAIL" if share >= limit or found is None else "WARN"
    advice = "correct the reward; the traceback is in the rollout servers' logs and in `penstock status --json`"
    if share and not failures:
        yield finding("rewards", level, f"failed{where}", advice)
    for notice in failures:
        yield finding("rewards", level, f"{notice.count} failed{where}; the first: {notice.text}", advice)
    for notice in facts.notices:
        if notice.kind == "default_reward":
            yield finding("rewards", "WARN", notice.text, "see docs/rewards.md")
        elif notice.kind == "prompt_failed":
            text = f"{notice.count} attempts failed; the first: {notice.text}"
            yield finding("prompts", "WARN", text, "see docs/troubleshooting.md")
    if not share and not failures:
        yield finding("rewards", "OK", "no reward has failed")


def _restarts(facts: RunFacts) -> Iterator[Finding]:
    for notice in facts.notices:
        if notice.kind == "process_restarted":
            times = "once" if notice.count == 1 else f"{notice.count} times; the first time"
            text = f"a process died {times}: {notice.text}"
            yield finding("restarts", "WARN", text, "its log says why; the kernel's log tells if memory was short")
        elif notice.kind == "server_failed":
            yield finding("servers", "WARN", notice.text, "its log has the whole traceback")
        elif notice.kind == "server_lost":
            advice = "start it again, or let `penstock runs resume` remove this notice"
            yield finding("servers", "WARN", notice.text, advice)


def _dead_letters(facts: RunFacts, reasons: Mapping[str, int]) -> Finding:
    stat = facts.stat
    if not stat.dead_lettered:
        return finding("dead letters", "OK", "no prompt was dead-lettered")
    share = stat.dead_lettered / (stat.dead_lettered + stat.inserted)
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    level: Level = "FAIL" if share >= (facts.config.dataset.max_dead_letter_share or 1.0) else "WARN"
    text = f"{stat.dead_lettered} prompts, {share:.0%} of those that ended, were dead-lettered ({counts})"
    return finding("dead letters", level, text, "`penstock queue dlq` lists them")


def _heartbeats(facts: RunFacts) -> Iterator[Finding]:
    for component, age_s in facts.ages_s.items():
        if age_s <= facts.config.replay.lease_ttl_s:
            yield finding("heartbeat", "OK", f"{component}, {age_s:.1f} s ago")
        else:
            text = f"{component} has been silent for {age_s:.0f} s"
            yield finding("heartbeat", "FAIL", text, "read its log and start it again")


def _weights(facts: RunFacts) -> Iterator[Finding]:
    digests = {policy.policy_version: policy.weights_digest for policy in facts.policies}
    for server in facts.serving:
        expected = digests.get(server.policy_version, "")
        if server.weights_digest and expected:
            is_same = server.weights_digest == expected
            has = "has exactly" if is_same else "has other weights than"
            text = f"{server.server_id} {has} version {server.policy_version}"
            yield finding("weights", "OK" if is_same else "FAIL", text, "" if is_same else "restart the server")


def _agreement(facts: RunFacts) -> Finding:
    """The newest known value of `penstock_algo_logprob_mismatch_nats`."""
    name = "log-probs"
    found = next((policy for policy in facts.policies if "logprob_mismatch" in policy.metrics), None)
    if found is None:
        return finding(name, "OK", "no step yet in which engine and learner can be compared")
    mismatch, allowed = found.metrics["logprob_mismatch"], ALLOWED_MISMATCH_NATS[facts.config.model.dtype]
    limit = facts.config.learner.max_logprob_mismatch_nats or float("inf")
    text = f"engine and learner differ by {mismatch:.2g} nats a token (version {found.policy_version})"
    if mismatch <= min(allowed, limit):
        return finding(name, "OK", text)
    return finding(name, "FAIL" if mismatch > limit else "WARN", text, "see docs/runbooks.md#traininfermismatch")


def _quarantines(facts: RunFacts) -> Iterator[Finding]:
    """Servers that are kept out of training because their log-probs disagree with the learner's."""
    for held in facts.quarantines.values():
        found = quarantine_finding(held.server_id, held.mismatch_nats, held.limit_nats, held.num_reloads)
        yield found.model_copy(update={"text": f"{found.text} (found at version {held.policy_version})"})
    if not facts.quarantines:
        yield finding("quarantine", "OK", "no server is in quarantine")
