"""Checks of rewards and prompts: what fails, and what is scored with the default reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.config.run import RunConfig
from penstock.doctor.finding import Finding, Level
from penstock.replay.queue_types import QueueStat
from penstock.store.notices import Notice
from penstock.v1 import policies_pb2

FAILED_RATIO = "reward_failed_ratio"


def check_rewards(
    notices: Sequence[Notice], policies: Sequence[policies_pb2.Policy], config: RunConfig
) -> Iterator[Finding]:
    """Check the share of failed rewards in the newest step, and what the rollout servers report."""
    found = next((policy for policy in policies if FAILED_RATIO in policy.metrics), None)
    share = 0.0 if found is None else found.metrics[FAILED_RATIO]
    failures = [notice for notice in notices if notice.kind == "reward_failed"]
    limit = config.rollout.reward.max_failed_share or 1.0
    where = " before the first step" if found is None else f", {share:.0%} of the samples of step {found.step}"
    level: Level = "fail" if share >= limit or found is None else "warn"
    advice = "correct the reward; the traceback is in the rollout servers' logs and in `penstock status --json`"
    if share and not failures:
        yield Finding("rewards", level, f"failed{where}", advice)
    for notice in failures:
        yield Finding("rewards", level, f"{notice.count} failed{where}; the first: {notice.text}", advice)
    for notice in notices:
        if notice.kind == "default_reward":
            yield Finding("rewards", "warn", notice.text, "see docs/rewards.md")
        elif notice.kind == "prompt_failed":
            text = f"{notice.count} attempts failed; the first: {notice.text}"
            yield Finding("prompts", "warn", text, "see docs/troubleshooting.md")
    if not share and not failures:
        yield Finding("rewards", "ok", "no reward has failed")


def check_dead_letters(stat: QueueStat, reasons: Mapping[str, int], limit: float | None) -> Finding:
    """Check the share of prompts that were dead-lettered, by reason."""
    if not stat.dead_lettered:
        return Finding("dead letters", "ok", "no prompt was dead-lettered")
    share = stat.dead_lettered / (stat.dead_lettered + stat.inserted)
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    level: Level = "fail" if share >= (limit or 1.0) else "warn"
    text = f"{stat.dead_lettered} prompts, {share:.0%} of those that ended, were dead-lettered ({counts})"
    return Finding("dead letters", level, text, "`penstock queue dlq` lists them")
