"""`penstock doctor`: the examination of a deployment, with advice. It only reads, with the rights of the config's Redis
user: what that user may not read becomes a warning."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from penstock.client.address import is_stopped
from penstock.config.gpu_bundles import num_gpus
from penstock.config.learner import TYPICAL_MISMATCH_NATS
from penstock.config.rollout import CodeReward
from penstock.config.run import RunConfig
from penstock.diagnosis import Finding, Level
from penstock.diagnosis.facts import RunFacts, RunStores
from penstock.diagnosis.progress import learning_finding, speed_finding
from penstock.errors import PenstockError
from penstock.machine import folder_bytes, gpu_names, measure_disk, nvidia_smi, port_is_free
from penstock.start_checks import RUN_CHECKS
from penstock.store.redis_client import RedisClient, connect

CONNECT_TIMEOUT_S = 2.0
MIN_FREE_BYTES = 5 * 2**30
SANDBOX_TIMEOUT_S = 60.0
MIN_REDIS = (6, 2)
EVERYSEC_LOSS_S = 2.0
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0
FAILED_RATIO = "reward_failed_ratio"


async def examine(config: RunConfig) -> list[Finding]:
    """Run every check, in the order in which the findings are shown. Without an answer from Redis, the checks that need
    it are skipped. It is not a fault that the private Redis of a stopped run does not answer."""
    findings = [*check_ports(config), check_disk(config), *check_gpus(config), *check_sandbox(config)]
    async with contextlib.aclosing(connect(config.redis)) as client:
        redis_findings = await check_redis(client, config)
        if is_stopped(config.folder) and any(finding.level == "fail" for finding in redis_findings):
            return [*check_stopped(config), *findings]
        findings += redis_findings
        if all(finding.check != "redis" or finding.level != "fail" for finding in redis_findings):
            findings += [await check_clock(client), *await check_run(client, config)]
    return findings


async def check_run(client: RedisClient, config: RunConfig) -> list[Finding]:
    stores = RunStores.of(client, config)
    try:
        facts, dead = await stores.read(config), await stores.queue.dead_letter_reasons()
    except PenstockError as refused:
        return [Finding("run", "warn", f"cannot be read: {refused}", "use a Redis user that may read the run's keys")]
    listening = [check_listens(server.server_id, *server.address.rsplit(":", 1)) for server in facts.servers]
    return [*run_findings(facts, dead), *listening]


def first_finding(check: str, *rules: tuple[object, Level, str, str], ok: str) -> Finding:
    """The finding of the first rule whose condition holds, with its level, text and advice; `ok` if none does."""
    for holds, level, text, advice in rules:
        if holds:
            return Finding(check, level, text, advice)
    return Finding(check, "ok", ok)


# ── a stopped run ──


def check_stopped(config: RunConfig) -> list[Finding]:
    """Say that the run is stopped and from where it continues, and check what its next start needs."""
    newest = max(config.folder.glob("checkpoints/term-*-step-*"), default=None)
    where = f"at its newest checkpoint, {newest.name}" if newest else "from the start: it has no checkpoint yet"
    findings = [Finding("run", "ok", f"{config.run} is stopped; `penstock up` with its config continues it {where}")]
    for name, check in RUN_CHECKS.items():
        try:
            check(config)
        except PenstockError as error:
            findings.append(Finding(name, "fail", f"the next start would fail: {error}"))
        else:
            findings.append(Finding(name, "ok", "the next start finds it as it should be"))
    return findings


# ── this machine ──


def check_ports(config: RunConfig) -> list[Finding]:
    """Check that the processes of a run listen where they announced; if the run is not up, that its ports are free."""
    findings = []
    files = [] if is_stopped(config.folder) else sorted(config.folder.glob("*.json"))
    for path in files:
        fields = json.loads(path.read_text())
        if isinstance(fields, dict) and "host" in fields:
            ports = [value for name, value in fields.items() if name.endswith("port")]
            findings += [check_listens(path.stem, fields["host"], port) for port in ports]
    if findings:
        return findings
    gateway, rollout, learner = config.gateway, config.rollout, config.learner
    for name, host, port in (
        ("gateway.port", gateway.host, gateway.port), ("gateway.grpc_port", gateway.host, gateway.grpc_port),
        ("rollout.port", rollout.host, rollout.port), ("rollout.metrics_port", rollout.host, rollout.metrics_port),
        ("learner.metrics_port", learner.metrics_host, learner.metrics_port),
    ):  # fmt: skip
        if port and not port_is_free(host, port):
            findings.append(Finding("ports", "fail", f"{name} {port} is in use", f"set {name} to a free one, or 0"))
    return findings or [Finding("ports", "ok", "the run is not up here; its ports are free")]


def check_listens(part: str, host: str, port: int | str) -> Finding:
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S):
            return Finding("ports", "ok", f"{part} listens on {host}:{port}")
    except OSError as error:
        text = f"{part} does not answer on {host}:{port} ({error.strerror or error})"
        return Finding("ports", "fail", text, "start it, or check the network and firewall")


def check_disk(config: RunConfig) -> Finding:
    """Check the space for checkpoints and snapshots. Two times the newest checkpoint must fit."""
    space = measure_disk(config.folder)
    newest = max(config.folder.glob("checkpoints/term-*-step-*"), default=None)
    needed = 2 * folder_bytes(newest) if newest else 0
    is_low, advice = space.free_bytes < max(MIN_FREE_BYTES, needed), "free space for checkpoints, or move run_dir"
    return first_finding("disk", (is_low, "warn", str(space), advice), ok=str(space))


def check_sandbox(config: RunConfig) -> list[Finding]:
    """Say how this machine isolates the programs of code rewards, by running one. Empty without a rollout server."""
    if importlib.util.find_spec("penstock_rollout") is None:
        return []
    reward = config.rollout.reward
    codes = [code for code in (*reward.by_data_source.values(), reward.default) if isinstance(code, CodeReward)]
    findings = []
    for confinement in dict.fromkeys(code.confinement for code in codes or [CodeReward()]):
        command = [sys.executable, "-m", "penstock_rollout.rewards.sandbox.run", confinement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SANDBOX_TIMEOUT_S, check=False)
        except (subprocess.SubprocessError, OSError) as error:
            findings.append(Finding("sandbox", "warn", f"could not be tried: {error}", "run penstock doctor again"))
            continue
        text = (done.stdout or done.stderr).strip().splitlines()[-1:] or ["no answer"]
        if done.returncode == 0:
            findings.append(Finding("sandbox", "ok", f"code rewards run {text[0]}"))
        else:
            level: Level = "fail" if codes else "warn"
            findings.append(Finding("sandbox", level, text[0], "see docs/rewards.md; other rewards work"))
    return findings


def check_gpus(config: RunConfig) -> list[Finding]:
    """Compare the GPUs of this machine with what the learner needs, and check that NVLink connects them."""
    wanted = num_gpus(config.learner.placement, config.learner.needed_roles)
    names = gpu_names()
    found = f"{len(names)} x {names[0]}" if names else "none here"
    if wanted > len(names) and not config.learner.ray_address:
        advice = "lower learner.*.num_ranks" if names else "install the driver, or set learner.*.gpus_per_rank to 0"
        return [Finding("gpus", "fail", f"{found}, but the learner needs {wanted}", advice)]
    if len(names) < 2:
        return [Finding("gpus", "ok", found if names else f"{found}, and the learner needs none here")]
    # Each row of the matrix has an X on the diagonal; the header has none.
    rows = [cells for line in nvidia_smi("topo", "-m") if "X" in (cells := line.split()) and cells[0].startswith("GPU")]
    links = {cell for row in rows for cell in row[1 : len(names) + 1]} - {"X"}
    is_linked = links and all(link.startswith("NV") for link in links)
    advice = "place policy ranks, and the GPUs of one server, on linked GPUs"
    text = f"{found}, not all linked by NVLink ({', '.join(sorted(links))})"
    return [first_finding("gpus", (not is_linked, "warn", text, advice), ok=f"{found}, linked by NVLink")]


# ── Redis ──


async def check_redis(client: RedisClient, config: RunConfig) -> list[Finding]:
    """Check that Redis answers, is new enough, writes to disk and does not evict keys."""
    asked: Any = client.info()
    try:
        info: dict[str, Any] = await asked
    except (NoPermissionError, ResponseError) as error:
        advice = "use a redis.url with the operator's user"
        return [Finding("redis", "warn", f"this user may not run INFO ({error})", advice)]
    except AuthenticationError as error:
        advice = "correct redis.url or redis.password_file"
        return [Finding("redis", "fail", f"refuses the user or password ({error})", advice)]
    except (RedisError, OSError) as error:
        return [
            Finding("redis", "fail", f"does not answer ({error})", "check redis.url and that the server is running")
        ]
    fsync = await _setting(client, "appendfsync")
    findings = [_version(info), _durability(info, fsync, config.replay.loss_window_s), _memory(info)]
    return findings + _disk(config, await _setting(client, "dir"))


def _version(info: dict[str, Any]) -> Finding:
    version = str(info.get("valkey_version") or info["redis_version"])
    is_old = tuple(int(part) for part in version.split(".")[:2]) < MIN_REDIS
    text, advice = f"version {version} is too old", "upgrade to 6.2 or newer"
    return first_finding("redis", (is_old, "fail", text, advice), ok=f"version {version}")


def _durability(info: dict[str, Any], fsync: str, loss_window_s: float) -> Finding:
    return first_finding(
        "durability",
        (not info.get("aof_enabled"),
         "fail", "no append-only file: a restart loses the queue", "set appendonly yes"),
        (info.get("aof_last_write_status", "ok") != "ok",
         "fail", "the last write of the append-only file failed", "free disk space on the Redis machine"),
        (fsync == "no",
         "warn", "appendfsync no: a crash may lose 30 s of writes", "set appendfsync everysec"),
        (fsync == "everysec" and loss_window_s < EVERYSEC_LOSS_S,
         "warn", f"append-only file, fsync every second, and replay.loss_window_s is {loss_window_s:g}",
         "set replay.loss_window_s to 2, so that a crash of the Redis machine loses nothing"),
        ok=f"append-only file, fsync {fsync or 'unknown'}",
    )  # fmt: skip


def _memory(info: dict[str, Any]) -> Finding:
    policy, limit, used = info.get("maxmemory_policy", ""), int(info.get("maxmemory", 0)), int(info["used_memory"])
    return first_finding(
        "memory",
        (limit and policy != "noeviction",
         "fail", f"{policy} may evict prompts and groups", "set maxmemory-policy noeviction"),
        (limit and used > 0.9 * limit,
         "warn", f"{used / max(limit, 1):.0%} of maxmemory is used", "raise maxmemory, or lower replay.capacity_bytes"),
        ok=f"{used / 2**20:.0f} MiB used, {policy or 'no limit'}",
    )  # fmt: skip


def _disk(config: RunConfig, folder: str) -> list[Finding]:
    """Check the space for the append-only file of a Redis on this machine, which refuses writes when its disk is
    full."""
    url = urlsplit(config.redis.url)
    is_here = url.scheme == "unix" or url.hostname in ("localhost", "127.0.0.1", "::1")
    if not is_here or not folder or not Path(folder).is_dir():
        return []
    space = measure_disk(Path(folder))
    text, advice = f"{space}, the folder of Redis", "free space, before Redis refuses writes"
    return [first_finding("disk", (space.is_low, "warn", text, advice), ok=text)]


async def _setting(client: RedisClient, name: str) -> str:
    """Value of a setting; empty if this user or a managed Redis does not allow CONFIG GET."""
    asked: Any = client.config_get(name)
    try:
        found = await asked
    except RedisError:
        return ""
    value = found.get(name, found.get(name.encode(), ""))
    return value.decode() if isinstance(value, bytes) else str(value)


async def check_clock(client: RedisClient) -> Finding:
    """Compare this machine's clock with Redis'. Leases use Redis' clock only; ages of groups and traces use both."""
    asked: Any = client.time()
    started = time.time()
    seconds, microseconds = await asked
    offset_s = int(seconds) + int(microseconds) / 1e6 - (started + time.time()) / 2
    text = f"this clock is {abs(offset_s):.2f} s {'behind' if offset_s > 0 else 'ahead of'} that of Redis"
    advice, off_s = "synchronise this machine's clock (NTP)", abs(offset_s)
    level: Level = "fail" if off_s >= CLOCK_FAIL_S else "warn"
    return first_finding("clock", (off_s >= CLOCK_WARN_S, level, text, advice), ok=text)


# ── the run ──


def run_findings(facts: RunFacts, dead_letter_reasons: Mapping[str, int]) -> list[Finding]:
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
