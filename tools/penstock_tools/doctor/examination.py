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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from penstock.api.records import Finding
from penstock.client.address import is_stopped
from penstock.config.gpu_bundles import num_gpus
from penstock.config.rollout import CodeReward
from penstock.config.run import RunConfig
from penstock.diagnosis import Level, finding
from penstock.diagnosis.facts import RunStores
from penstock.diagnosis.health import run_findings
from penstock.errors import PenstockError
from penstock.machine import folder_bytes, gpu_names, idle_gpus, measure_disk, nvidia_smi, port_is_free
from penstock.start_checks import RUN_CHECKS, checks_of_hub_files
from penstock.store.redis_client import RedisClient, connect

CONNECT_TIMEOUT_S = 2.0
MIN_FREE_BYTES = 5 * 2**30
SANDBOX_TIMEOUT_S = 60.0
MIN_REDIS = (6, 2)
EVERYSEC_LOSS_S = 2.0
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0


async def examine(config: RunConfig) -> list[Finding]:
    """Run every check, in the order in which the findings are shown. Without an answer from Redis, the checks that need
    it are skipped. It is not a fault that the private Redis of a stopped run does not answer."""
    findings = [*check_ports(config), check_disk(config), *check_gpus(config), *check_sandbox(config)]
    async with contextlib.aclosing(connect(config.redis)) as client:
        redis_findings = await check_redis(client, config)
        if is_stopped(config.folder) and any(finding.level == "FAIL" for finding in redis_findings):
            return [*check_stopped(config), *findings]
        findings += redis_findings
        if all(finding.check != "redis" or finding.level != "FAIL" for finding in redis_findings):
            findings += [await check_clock(client), *await check_run(client, config)]
    return findings


async def check_run(client: RedisClient, config: RunConfig) -> list[Finding]:
    stores = RunStores.of(client, config)
    try:
        facts, dead = await stores.read(config), await stores.queue.dead_letter_reasons()
    except PenstockError as refused:
        return [finding("run", "WARN", f"cannot be read: {refused}", "use a Redis user that may read the run's keys")]
    listening = [check_listens(server.server_id, *server.address.rsplit(":", 1)) for server in facts.servers]
    return [*run_findings(facts, dead), *listening]


def first_finding(check: str, *rules: tuple[object, Level, str, str], ok: str) -> Finding:
    """The finding of the first rule whose condition holds, with its level, text and advice; `ok` if none does."""
    for holds, level, text, advice in rules:
        if holds:
            return finding(check, level, text, advice)
    return finding(check, "OK", ok)


# ── a stopped run ──


def newest_checkpoint(config: RunConfig) -> Path | None:
    """The newest checkpoint that is whole: one that is being written has another name."""
    found = config.folder.glob("checkpoints/term-*-step-*")
    return max((path for path in found if path.suffix != ".partial"), default=None)


def check_stopped(config: RunConfig) -> list[Finding]:
    """Say that the run is stopped and from where it continues, and check what its next start needs."""
    newest = newest_checkpoint(config)
    where = f"at its newest checkpoint, {newest.name}" if newest else "from the start: it has no checkpoint yet"
    findings = [finding("run", "OK", f"{config.run} is stopped; `penstock up` with its config continues it {where}")]
    fetched = checks_of_hub_files(config)
    for name, check in RUN_CHECKS.items():
        if name in fetched:
            findings.append(finding(name, "OK", "the next start takes it from the Hub, or its cache here"))
            continue
        try:
            check(config)
        except PenstockError as error:
            findings.append(finding(name, "FAIL", f"the next start would fail: {error}"))
        else:
            findings.append(finding(name, "OK", "the next start finds it as it should be"))
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
            findings.append(finding("ports", "FAIL", f"{name} {port} is in use", f"set {name} to a free one, or 0"))
    return findings or [finding("ports", "OK", "the run is not up here; its ports are free")]


def check_listens(part: str, host: str, port: int | str) -> Finding:
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S):
            return finding("ports", "OK", f"{part} listens on {host}:{port}")
    except OSError as error:
        text = f"{part} does not answer on {host}:{port} ({error.strerror or error})"
        return finding("ports", "FAIL", text, "start it, or check the network and firewall")


def check_disk(config: RunConfig) -> Finding:
    """Check the space for checkpoints and snapshots. Two times the newest checkpoint must fit."""
    space = measure_disk(config.folder)
    newest = newest_checkpoint(config)
    needed = 2 * folder_bytes(newest) if newest else 0
    is_low, advice = space.free_bytes < max(MIN_FREE_BYTES, needed), "free space for checkpoints, or move run_dir"
    return first_finding("disk", (is_low, "WARN", str(space), advice), ok=str(space))


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
            findings.append(finding("sandbox", "WARN", f"could not be tried: {error}", "run penstock doctor again"))
            continue
        (text,) = (done.stdout or done.stderr).strip().splitlines()[-1:] or ["no answer"]
        level: Level = "FAIL" if codes else "WARN"
        refusal = (done.returncode, level, text, "see docs/rewards.md; other rewards work")
        findings.append(first_finding("sandbox", refusal, ok=f"code rewards run {text}"))
    return findings


def check_gpus(config: RunConfig) -> list[Finding]:
    """Check that there are as many GPUs as the learner needs, that packages use them and that NVLink connects them."""
    wanted = num_gpus(config.learner.placement, config.learner.needed_roles)
    names = gpu_names()
    found = f"{len(names)} x {names[0]}" if names else "none here"
    if wanted > len(names) and not config.learner.ray_address:
        advice = "lower learner.*.num_ranks" if names else "install the driver, or set learner.*.gpus_per_rank to 0"
        return [finding("gpus", "FAIL", f"{found}, but the learner needs {wanted}", advice)]
    if idle := idle_gpus():
        text, _, advice = idle.partition("; ")
        return [finding("gpus", "FAIL" if wanted else "WARN", text, advice)]
    if len(names) < 2:
        return [finding("gpus", "OK", found if names else f"{found}, and the learner needs none here")]
    # Each row of the matrix has an X on the diagonal; the header has none.
    rows = [cells for line in nvidia_smi("topo", "-m") if "X" in (cells := line.split()) and cells[0].startswith("GPU")]
    links = {cell for row in rows for cell in row[1 : len(names) + 1]} - {"X"}
    is_linked = links and all(link.startswith("NV") for link in links)
    advice = "place policy ranks, and the GPUs of one server, on linked GPUs"
    text = f"{found}, not all linked by NVLink ({', '.join(sorted(links))})"
    return [first_finding("gpus", (not is_linked, "WARN", text, advice), ok=f"{found}, linked by NVLink")]


# ── Redis ──


async def check_redis(client: RedisClient, config: RunConfig) -> list[Finding]:
    """Check that Redis answers, is new enough, writes to disk and does not evict keys."""
    asked: Any = client.info()
    try:
        info: dict[str, Any] = await asked
    except (NoPermissionError, ResponseError) as error:
        advice = "use a redis.url with the operator's user"
        return [finding("redis", "WARN", f"this user may not run INFO ({error})", advice)]
    except AuthenticationError as error:
        advice = "correct redis.url or redis.password_file"
        return [finding("redis", "FAIL", f"refuses the user or password ({error})", advice)]
    except (RedisError, OSError) as error:
        advice = "check redis.url and that the server is running"
        return [finding("redis", "FAIL", f"does not answer ({error})", advice)]
    fsync = await _setting(client, "appendfsync")
    findings = [_version(info), _durability(info, fsync, config), _memory(info)]
    return findings + _disk(config, await _setting(client, "dir"))


def _version(info: dict[str, Any]) -> Finding:
    version = str(info.get("valkey_version") or info["redis_version"])
    is_old = tuple(int(part) for part in version.split(".")[:2]) < MIN_REDIS
    text, advice = f"version {version} is too old", "upgrade to 6.2 or newer"
    return first_finding("redis", (is_old, "FAIL", text, advice), ok=f"version {version}")


def _durability(info: dict[str, Any], fsync: str, config: RunConfig) -> Finding:
    loss_window_s = config.replay.loss_window_s
    may_lose = fsync == "everysec" and loss_window_s < EVERYSEC_LOSS_S
    note = "; if this machine crashes, the queue loses up to 2 s, unless replay.loss_window_s is 2" * may_lose
    return first_finding(
        "durability",
        (not info.get("aof_enabled"),
         "FAIL", "no append-only file: a restart loses the queue", "set appendonly yes"),
        (info.get("aof_last_write_status", "ok") != "ok",
         "FAIL", "the last write of the append-only file failed", "free disk space on the Redis machine"),
        (fsync == "no",
         "WARN", "appendfsync no: a crash may lose 30 s of writes", "set appendfsync everysec"),
        (may_lose and not _is_here(config),
         "WARN", f"append-only file, fsync every second, and replay.loss_window_s is {loss_window_s:g}",
         "set replay.loss_window_s to 2, so that a crash of the Redis machine loses nothing"),
        ok=f"append-only file, fsync {fsync or 'unknown'}{note}",
    )  # fmt: skip


def _memory(info: dict[str, Any]) -> Finding:
    policy, limit, used = info.get("maxmemory_policy", ""), int(info.get("maxmemory", 0)), int(info["used_memory"])
    return first_finding(
        "memory",
        (limit and policy != "noeviction",
         "FAIL", f"{policy} may evict prompts and groups", "set maxmemory-policy noeviction"),
        (limit and used > 0.9 * limit,
         "WARN", f"{used / max(limit, 1):.0%} of maxmemory is used", "raise maxmemory, or lower replay.capacity_bytes"),
        ok=f"{used / 2**20:.0f} MiB used, {policy or 'no limit'}",
    )  # fmt: skip


def _disk(config: RunConfig, folder: str) -> list[Finding]:
    """Check the space for the append-only file of a Redis on this machine, which refuses writes when its disk is
    full."""
    if not _is_here(config) or not folder or not Path(folder).is_dir():
        return []
    space = measure_disk(Path(folder))
    text, advice = f"{space}, the folder of Redis", "free space, before Redis refuses writes"
    return [first_finding("disk", (space.is_low, "WARN", text, advice), ok=text)]


def _is_here(config: RunConfig) -> bool:
    url = urlsplit(config.redis.url)
    return url.scheme == "unix" or url.hostname in ("localhost", "127.0.0.1", "::1")


async def _setting(client: RedisClient, name: str) -> str:
    """Value of a setting; empty if this user or a managed Redis does not allow CONFIG GET."""
    asked: Any = client.config_get(name)
    try:
        return str((await asked).get(name, ""))
    except RedisError:
        return ""


async def check_clock(client: RedisClient) -> Finding:
    """Compare this machine's clock with Redis'. Leases use Redis' clock only; ages of groups and traces use both."""
    asked: Any = client.time()
    started = time.time()
    seconds, microseconds = await asked
    ended = time.time()
    offset_s = int(seconds) + int(microseconds) / 1e6 - (started + ended) / 2
    text = f"this clock is {abs(offset_s):.2f} s {'behind' if offset_s > 0 else 'ahead of'} that of Redis"
    advice = "synchronise this machine's clock (NTP)"
    off_s = abs(offset_s) - (ended - started) / 2  # at least: Redis may have answered at any moment in between
    level: Level = "FAIL" if off_s >= CLOCK_FAIL_S else "WARN"
    return first_finding("clock", (off_s >= CLOCK_WARN_S, level, text, advice), ok=text)
