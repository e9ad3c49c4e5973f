"""Why a run does not learn, and why it is slow: one line each, with the numbers behind it.

Both are pure functions of the run's facts. A cause that hides others comes first: while rewards fail, nothing else
about the reward means anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, variance
from typing import Literal, get_args

from penstock.api.records import Finding
from penstock.diagnosis import Level, finding
from penstock.diagnosis.facts import RunFacts
from penstock.store.reports import LAST_VALIDATION

NEWEST_STEPS = 30
"""Steps that the trend of the reward is taken from."""
MIN_TREND_STEPS = 6
"""Fewer steps than this show no trend."""
MIN_FLAT_STEPS = 12
"""From this many steps on, a reward that does not change significantly is flat. With fewer, noise may hide its rise."""
DOMINANT_SHARE = 0.9
"""Share from which on a cause explains the whole step."""
MAJORITY_SHARE = 0.5
SOLVED = 0.95
"""Share of the way from the lowest to the highest reward from which on a task counts as learned."""
NEARLY_SOLVED = 0.8
"""Share of that way from which on a flat reward needs no other cause."""
LOW_EFFECTIVE = 0.2
SPEED_STEPS = 10
"""Steps that the times are taken from."""
LEARNER_BOUND = 0.3
"""Below this share of waiting, the learner itself is the bottleneck."""
PHASES = {
    "update": "update", "forward": "forward", "gather": "gathering weights", "compare": "comparing servers' log-probs",
}  # fmt: skip
"""What a learner does in a step, by the metric of its seconds."""
LOWEST_LR = 1e-8
COLLAPSED_ENTROPY_NATS = 0.01
FAR_KL_NATS = 0.5
FULL_KV = 0.95

Steps = Sequence[Mapping[str, float]]
LearningCode = Literal[
    "no_step", "few_steps", "rising", "flat", "falling", "solved", "rewards_fail", "truncated", "no_spread",
    "skipped", "learning_rate", "weights", "stale", "collapsed", "kl",
]  # fmt: skip
SpeedCode = Literal[
    "not_running", "servers", "failures", "learner", "weights", "prompts", "admission", "rewards", "kv_full", "engine",
    "groups", "validation",
]  # fmt: skip
LEARNING_CODES: tuple[LearningCode, ...] = get_args(LearningCode)
SPEED_CODES: tuple[SpeedCode, ...] = get_args(SpeedCode)


def _learning(code: LearningCode, text: str, level: Level = "OK", advice: str = "") -> Finding:
    return finding("learning", level, text, advice, code)


def _speed(code: SpeedCode, text: str, level: Level = "OK", advice: str = "") -> Finding:
    return finding("speed", level, text, advice, code)


def learning_finding(facts: RunFacts) -> Finding:
    """Whether the reward rises, and if not, the most likely cause."""
    steps = facts.steps[-NEWEST_STEPS:]
    if not steps:
        return _learning("no_step", "no step yet")
    rewards = [step["reward_mean"] for step in steps]
    reward, trend = f"reward {fmean(rewards):.3g} over {_count(len(steps), 'step')}", _trend(rewards)
    failed = _mean(steps, "reward_failed_ratio")
    if failed < DOMINANT_SHARE and trend == "rising":
        first, last = (fmean(third) for third in _thirds(rewards))
        return _learning("rising", f"{reward}, rising from {first:.3g} to {last:.3g}")
    if cause := next(_causes(facts, steps), None):
        known = "" if trend == "unknown" else f", {trend}"
        return cause.model_copy(update={"text": f"{reward}{known}: {cause.text}"})
    if trend == "unknown" or (trend == "flat" and len(steps) < MIN_FLAT_STEPS):
        return _learning("few_steps", f"{reward}: too few steps to tell")
    if trend == "flat" and (share := _solved_share(steps)) >= NEARLY_SOLVED:
        return _learning("solved", f"{reward}, flat at {share:.0%} of the highest reward: little is left to learn")
    numbers = (
        f"{1 - _mean(steps, 'zero_advantage_group_ratio'):.0%} of the groups have spread, learning rate "
        f"{_mean(steps, 'lr'):.2g}, gradient norm {_mean(steps, 'grad_norm'):.2g}, KL "
        f"{_mean(steps, 'kl_reference'):.2g}, staleness {_mean(steps, 'staleness_mean'):.2g}"
    )
    advice = "read samples, and compare learner.lr with what worked for this model"
    return _learning(trend, f"{reward}, {trend}, without an obvious cause ({numbers})", "WARN", advice)


def _causes(facts: RunFacts, steps: Steps) -> Iterator[Finding]:
    """Causes of a reward that does not rise, from the one that explains most to the one that explains least."""
    failed, truncated = _mean(steps, "reward_failed_ratio"), _mean(steps, "truncated_ratio")
    fails = f"the reward function fails on {failed:.0%} of the samples"
    flat, skipped = _mean(steps, "zero_advantage_group_ratio"), _mean(steps, "skipped")
    lr, entropy = _mean(steps, "lr", default=1.0), _mean(steps, "entropy", default=1.0)
    lag = max((facts.stat.policy_version - server.policy_version for server in facts.serving), default=0)
    effective, rejected = _mean(steps, "effective_sample_ratio", default=1.0), _mean(steps, "is_rejected_ratio")
    kl = _mean(steps, "kl_reference")
    causes: tuple[tuple[object, LearningCode, str, Level, str], ...] = (
        (failed >= DOMINANT_SHARE, "rewards_fail", fails, "FAIL", "correct the reward"),
        (_solved_share(steps) >= SOLVED,
         "solved", "almost all samples get the highest reward, so there is little left to learn", "OK", ""),
        (truncated >= MAJORITY_SHARE, "truncated", f"{truncated:.0%} of the responses are cut at max_tokens",
         "FAIL" if max(truncated, flat) >= DOMINANT_SHARE else "WARN", "raise it"),
        (flat >= DOMINANT_SHARE,
         "no_spread", f"{flat:.0%} of the groups have no spread in reward, so they train nothing", "FAIL",
         "give easier or harder prompts, or a reward with more steps"),
        (skipped >= MAJORITY_SHARE,
         "skipped", f"{skipped:.0%} of the steps were skipped because a gradient was not finite", "FAIL",
         "see docs/runbooks.md#nonfinitesteps"),
        (lr <= LOWEST_LR, "learning_rate", f"the learning rate is {lr:.2g}", "FAIL", "see learner.lr and its schedule"),
        (lag > facts.config.replay.max_staleness + 2,
         "weights", f"new weights do not arrive: a server is {lag} versions behind the learner",
         "FAIL", "see docs/runbooks.md#policyversionskew"),
        (rejected >= MAJORITY_SHARE or effective <= LOW_EFFECTIVE,
         "stale", f"the samples are too old: staleness {_mean(steps, 'staleness_mean'):.2g}, {rejected:.0%} of the "
         f"tokens rejected, an effective share of {effective:.0%}", "WARN", "lower replay.max_staleness"),
        (entropy < COLLAPSED_ENTROPY_NATS,
         "collapsed", f"the policy gives almost the same answer every time: entropy {entropy:.2g} nats a token",
         "WARN", "rewind to an earlier version, with a lower learner.lr"),
        (kl >= FAR_KL_NATS, "kl", f"the policy is far from its reference: KL {kl:.2g} nats a token",
         "WARN", "lower learner.lr, or raise the KL coefficient"),
        (failed, "rewards_fail", fails, "WARN", "correct the reward"),
    )  # fmt: skip
    return (_learning(code, text, level, advice) for holds, code, text, level, advice in causes if holds)


def speed_finding(facts: RunFacts) -> Finding:
    """What the run waits for most."""
    steps = facts.steps[-SPEED_STEPS:]
    validating = f"; {facts.validation}" if facts.validation else ""
    if facts.state == "WAITING":
        return _speed("not_running", f"the run is waiting for its learner or its servers to start{validating}")
    if facts.state != "RUNNING":
        return _speed("not_running", f"the run is {facts.state.lower()}")
    if facts.learner_phase == LAST_VALIDATION:
        text = "every step is made; the learner waits for the validation of the last policy"
        return _speed("validation", text + validating)
    if not facts.serving:
        advice = "see docs/runbooks.md#rolloutserversdown"
        return _speed("servers", f"no server serves, of {len(facts.servers)} in the list", "FAIL", advice)
    if len(facts.breakers) == len(facts.servers):
        text = "no server leases a prompt, because everything that they tried failed"
        return _speed("failures", text, "FAIL", "see docs/runbooks.md#leasingpaused")
    step_s, wait_s = _mean(steps, "step_s"), _mean(steps, "wait_s")
    if step_s and wait_s < LEARNER_BOUND * step_s:
        return _learner_finding(steps, step_s, wait_s)
    waits = f"the learner waits {wait_s / step_s:.0%} of {step_s:.3g} s a step" if step_s else "no step yet"
    cause = _producer_finding(facts)
    if facts.validation and (cause.code == "admission" or (not step_s and cause.code in ("groups", "engine"))):
        return _speed("validation", f"{waits}: {facts.validation}" if step_s else str(facts.validation))
    if not step_s and cause.code in ("admission", "groups"):  # it says nothing yet about the speed of the run
        stat = facts.stat
        text = f"no step yet: {stat.in_flight} groups are being generated, and {stat.queued} wait for the learner"
        return _speed("groups", text)
    return cause.model_copy(update={"text": f"{waits}: {cause.text}"})


def _learner_finding(steps: Steps, step_s: float, wait_s: float) -> Finding:
    shares = {name: _mean(steps, f"{name}_s") / step_s for name in PHASES}
    rest = 1 - sum(shares.values()) - wait_s / step_s
    largest = sorted(shares, key=lambda name: -shares[name])
    listed = ", ".join(f"{PHASES[name]} {shares[name]:.0%}" for name in largest)
    text = f"{step_s:.3g} s a step, of which {listed}, waiting {wait_s / step_s:.0%}, the rest {max(0.0, rest):.0%}"
    if shares["gather"] >= LEARNER_BOUND:
        return _speed("weights", f"gathering the weights takes long: {text}", "WARN", "see docs/weight-push.md")
    return _speed("learner", f"the learner is the bottleneck: {text}")


def _producer_finding(facts: RunFacts) -> Finding:
    """What keeps the servers from making groups faster."""
    stat, serving = facts.stat, facts.serving
    groups, scoring = sum(s.running_groups for s in serving), sum(s.scoring_groups for s in serving)
    running, waiting = sum(s.running_requests for s in serving), sum(s.waiting_requests for s in serving)
    kv_usage = max(server.kv_cache_usage for server in serving)
    where = f"{_count(groups, 'group')} on {_count(len(serving), 'server')}"
    if not stat.pending_prompts and not groups:
        return _prompts_finding(facts)
    if not groups and stat.admission_room <= 0:
        ready = stat.queued - stat.delivered
        text = f"no prompt is admitted, because the staleness bound is reached; {ready} groups are ready"
        return _speed("admission", text, "WARN", "raise replay.max_staleness")
    if groups and scoring >= MAJORITY_SHARE * groups:
        text = f"rewards take long: {scoring} of {where} are being scored"
        return _speed("rewards", text, "WARN", "raise rollout.reward.num_processes")
    if waiting and kv_usage >= FULL_KV:
        text = f"the KV cache is full ({kv_usage:.0%}): {waiting} requests wait and {running} run"
        return _speed("kv_full", text, "WARN", "give the engines more memory, or ask for shorter responses")
    if waiting > running:
        text = f"the engines are saturated: {waiting} requests wait and {running} run"
        return _speed("engine", text, "WARN", "add servers")
    advice = "add servers, or raise rollout.max_concurrent_groups"
    return _speed("groups", f"generation takes long: {where}, {running} requests run", advice=advice)


def _prompts_finding(facts: RunFacts) -> Finding:
    """Servers have nothing to do. Prompts of evaluations do not count: they are not trained."""
    stat = facts.stat
    if stat.admitted:
        per_step = facts.config.replay.groups_per_step
        ready = stat.queued + stat.trained - stat.num_trained(per_step)
        text = f"no prompts are pending, and {ready} of the {per_step} groups of a step are ready"
        return _speed("prompts", text, advice="submit some, or feed a dataset")
    if facts.config.dataset.file is not None:
        advice = "the log of the feed says what it does"
        return _speed("prompts", "the feed has not submitted a prompt of the dataset", "WARN", advice)
    advice = "use `penstock submit FILE` or a client, or set dataset.file and start the run again"
    return _speed("prompts", "no prompt to train on has been submitted", advice=advice)


def _solved_share(steps: Steps) -> float:
    """How far the reward is now, in the last third of the steps, from the lowest to the highest that samples get. 0
    while all rewards are equal."""
    highest = max((step["reward_max"] for step in steps if "reward_max" in step), default=0.0)
    lowest = min((step["reward_min"] for step in steps if "reward_min" in step), default=0.0)
    now = _mean(steps[-max(1, len(steps) // 3) :], "reward_mean")
    return (now - lowest) / (highest - lowest) if highest > lowest else 0.0


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _mean(steps: Iterable[Mapping[str, float]], name: str, default: float = 0.0) -> float:
    values = [step[name] for step in steps if name in step]
    return fmean(values) if values else default


def _trend(rewards: Sequence[float]) -> Literal["rising", "flat", "falling", "unknown"]:
    """Compare the first and the last third. A difference within twice its standard error does not count."""
    if len(rewards) < MIN_TREND_STEPS:
        return "unknown"
    first, last = _thirds(rewards)
    rise = fmean(last) - fmean(first)
    noise = 2 * ((variance(first) + variance(last)) / len(first)) ** 0.5
    if abs(rise) <= max(noise, 1e-6):
        return "flat"
    return "rising" if rise > 0 else "falling"


def _thirds(rewards: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    third = len(rewards) // 3
    return rewards[:third], rewards[-third:]
