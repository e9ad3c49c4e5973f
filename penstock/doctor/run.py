"""Checks of what a run stored in Redis: conservation, servers that are paused or in quarantine, heartbeats, weights and
log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.config.run import RunConfig
from penstock.doctor.finding import Finding
from penstock.doctor.machine import check_listens
from penstock.doctor.rewards import check_dead_letters, check_rewards
from penstock.errors import NotFound, PenstockError
from penstock.logprob_mismatch import TYPICAL_MISMATCH_NATS
from penstock.replay.queue_types import QueueStat
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.run_state import RunFacts, RunState, has_learner, has_servers, is_learner_starting, run_state
from penstock.store.breakers import OpenBreaker
from penstock.store.fleet import SERVING_STATES, Fleet, ServerRecord
from penstock.store.heartbeats import Heartbeats
from penstock.store.notices import Notice, Notices
from penstock.store.phases import Phases
from penstock.store.policies import PolicyRegistry
from penstock.store.quarantine import Quarantine
from penstock.store.redis_client import RedisClient
from penstock.store.run_control import Orders, RunControl
from penstock.v1 import policies_pb2
from penstock.verdicts import LOOKED_BACK_VERSIONS, Situation, learning_verdict, speed_verdict, steps_of


async def check_run(client: RedisClient, config: RunConfig) -> list[Finding]:
    """Check the run's queue, servers, components and policies."""
    try:
        queue = RedisReplayQueue(client, config.run, config.replay)
        stat, control = await queue.stat(), RunControl(client, config.run)
        servers = await Fleet(client, config.run).servers()
        breakers, quarantines = await control.open_breakers(), await control.quarantines()
        orders, dead = await control.orders(), await queue.dead_letter_reasons()
        reason, notices = await control.pause_reason(), await Notices(client, config.run).newest_first()
        ages_s = await Heartbeats(client, config.run).ages_s()
        is_alive = has_learner(ages_s, config.replay.lease_ttl_s)
        is_starting = await is_learner_starting(Phases(client, config.run), is_alive)
        policies = await PolicyRegistry(client, config.run).newest_first(None, LOOKED_BACK_VERSIONS)
    except (PenstockError, NotFound) as refused:
        return [Finding("run", "warn", f"cannot be read: {refused}", "use a Redis user that may read the run's keys")]
    findings = [_conservation(stat), *_admission(stat, config.replay.groups_per_step)]
    findings += [*_pause(orders, reason), *_breakers(servers, breakers), *check_rewards(notices, policies, config)]
    findings += _progress(
        Situation(
            steps_of(policies),
            _state(config, stat, orders, servers, ages_s, is_starting),
            stat,
            servers,
            len(breakers),
        ).within(config)
    )
    findings += _restarts(notices)
    findings.append(check_dead_letters(stat, dead, config.dataset.max_buried_share))
    ages_s |= {server.server_id: server.heartbeat_age_ms / 1000 for server in servers}
    findings += [_heartbeat(component, age_s, config.replay.lease_ttl_s) for component, age_s in ages_s.items()]
    findings += [check_listens(server.server_id, *server.address.rsplit(":", 1)) for server in servers]
    return [*findings, *_weights(servers, policies), _agreement(policies, config), *_quarantines(servers, quarantines)]


def _progress(situation: Situation) -> Iterator[Finding]:
    """Say whether the run learns, and what it waits for."""
    for name, verdict in (("learning", learning_verdict(situation)), ("speed", speed_verdict(situation))):
        yield Finding(name, verdict.level, verdict.text, verdict.advice)


def _state(
    config: RunConfig,
    stat: QueueStat,
    orders: Orders,
    servers: list[ServerRecord],
    ages_s: dict[str, float],
    is_starting: bool,
) -> RunState:
    return run_state(
        RunFacts(
            step=stat.step,
            num_steps=config.learner.num_steps,
            finished_step=stat.finished_step,
            term=stat.term,
            orders=orders,
            has_learner=has_learner(ages_s, config.replay.lease_ttl_s),
            has_servers=has_servers(servers),
            is_learner_starting=is_starting,
        )
    )


def _pause(orders: Orders, reason: str) -> Iterator[Finding]:
    if orders.is_paused:
        text = f"the run paused itself: {reason}" if reason else "an operator has paused the run"
        yield Finding("state", "fail" if reason else "warn", text, "`penstock runs resume` continues it")


def _restarts(notices: Sequence[Notice]) -> Iterator[Finding]:
    for notice in notices:
        if notice.kind == "process_restarted":
            times = "once" if notice.count == 1 else f"{notice.count} times; the first time"
            text = f"a process died {times}: {notice.text}"
            yield Finding("restarts", "warn", text, "its log says why; the kernel's log tells if memory was short")
        elif notice.kind == "server_failed":
            yield Finding("servers", "warn", notice.text, "its log has the whole traceback")
        elif notice.kind == "server_lost":
            yield Finding(
                "servers", "warn", notice.text, "start it again, or let `penstock runs resume` remove this notice"
            )


def _breakers(servers: list[ServerRecord], breakers: list[OpenBreaker]) -> list[Finding]:
    """Check whether servers lease nothing because everything that they tried failed."""
    known = {server.server_id for server in servers}
    paused = [breaker for breaker in breakers if breaker.server_id in known]
    if not paused:
        return [Finding("leasing", "ok", "no server is paused by failures")]
    return [
        Finding(
            "leasing", "fail",
            f"{breaker.server_id} leases nothing: its last {breaker.num_failures} attempts failed, the newest with "
            f"{breaker.reason}; it tries one prompt in {breaker.probe_in_s:.0f} s",
            "see docs/runbooks.md#leasingpaused",
        )
        for breaker in paused
    ]  # fmt: skip


def _quarantines(servers: list[ServerRecord], quarantines: Mapping[str, Quarantine]) -> list[Finding]:
    """Check whether servers are kept out of training because their log-probs disagree with the learner's."""
    held = [quarantines[server.server_id] for server in servers if server.server_id in quarantines]
    if not held:
        return [Finding("quarantine", "ok", "no server is in quarantine")]
    return [
        Finding(
            "quarantine", "fail",
            f"{one.server_id} differs from the learner by {one.mismatch_nats:.3g} nats a token, more than "
            f"{one.limit_nats:.3g} (version {one.policy_version}); its weights were loaded again "
            f"{one.num_reloads} times",
            "see docs/runbooks.md#serverquarantined",
        )
        for one in held
    ]  # fmt: skip


def _conservation(stat: QueueStat) -> Finding:
    if stat.conservation_error:
        text = f"off by {stat.conservation_error}"
        return Finding("conservation", "fail", text, "see docs/runbooks.md#conservationbroken")
    return Finding("conservation", "ok", "every admitted group is accounted for")


def _admission(stat: QueueStat, groups_per_step: int) -> Iterator[Finding]:
    """Name a run that can never complete its next batch: too few groups are on their way, and none may be admitted."""
    if stat.admission_room > 0 or stat.queued + stat.in_flight >= groups_per_step:
        return
    text = f"no prompt can be admitted, and {stat.queued + stat.in_flight} of {groups_per_step} groups are on their way"
    if stat.step < stat.committed_step:
        text += f": the learner is at step {stat.step}, below the committed step {stat.committed_step}"
    yield Finding(
        "admission", "fail", text, "start the learner from its newest checkpoint, or see docs/learner.md#going-back"
    )


def _heartbeat(component: str, age_s: float, limit_s: float) -> Finding:
    if age_s <= limit_s:
        return Finding("heartbeat", "ok", f"{component}, {age_s:.1f} s ago")
    return Finding(
        "heartbeat", "fail", f"{component} has been silent for {age_s:.0f} s", "read its log and start it again"
    )


def _weights(servers: list[ServerRecord], policies: list[policies_pb2.Policy]) -> Iterator[Finding]:
    """Compare the digest of each server's weights with the digest that the learner published."""
    digests = {policy.policy_version: policy.weights_digest for policy in policies}
    for server in servers:
        expected = digests.get(server.policy_version, "")
        if server.state in SERVING_STATES and server.weights_digest and expected:
            is_same = server.weights_digest == expected
            has = "has exactly" if is_same else "has other weights than"
            text = f"{server.server_id} {has} version {server.policy_version}"
            yield Finding("weights", "ok" if is_same else "fail", text, "" if is_same else "restart the server")


def _agreement(policies: list[policies_pb2.Policy], config: RunConfig) -> Finding:
    """Check the newest known value of `penstock_algo_logprob_mismatch_nats`."""
    name = "log-probs"
    found = next((policy for policy in policies if "logprob_mismatch" in policy.metrics), None)
    if found is None:
        return Finding(name, "ok", "no step yet in which engine and learner can be compared")
    mismatch, typical = found.metrics["logprob_mismatch"], TYPICAL_MISMATCH_NATS[config.model.dtype]
    limit = config.learner.max_logprob_mismatch_nats or float("inf")
    text = f"engine and learner differ by {mismatch:.2g} nats a token (version {found.policy_version})"
    if mismatch <= min(typical, limit):
        return Finding(name, "ok", text)
    return Finding(name, "fail" if mismatch > limit else "warn", text, "see docs/runbooks.md#traininfermismatch")
