"""Checks of a deployment, each with what to do about it. Only looks: nothing is changed.

Redis is asked with the rights of the config's user; what it may not ask is a warning, not a guess.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from penstock.config.run import RunConfig
from penstock.errors import NotFound, PenstockError
from penstock.ports import port_is_free
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.fleet import SERVING_STATES, Fleet, ServerRecord
from penstock.store.heartbeats import Heartbeats
from penstock.store.policies import PolicyRegistry
from penstock.store.redis_client import RedisClient, connect
from penstock.v1 import policies_pb2

Level = Literal["ok", "warn", "fail"]
MIN_REDIS = (6, 2)
EVERYSEC_LOSS_S = 2.0
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0
CONNECT_TIMEOUT_S = 2.0
MIN_FREE_BYTES = 5 * 2**30
LOOKED_BACK_VERSIONS = 50
TYPICAL_MISMATCH_NATS = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
NVIDIA_SMI_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Finding:
    check: str
    level: Level
    text: str
    advice: str = ""
    """What to do; empty where nothing is to be done."""


async def examine(config: RunConfig) -> list[Finding]:
    """Every check that makes sense for what answers."""
    findings = [*check_ports(config), check_disk(config), *check_gpus(config)]
    client = connect(config.redis)
    try:
        reached = await check_redis(client, config)
        findings += reached
        if all(finding.check != "redis" or finding.level != "fail" for finding in reached):
            findings += [await check_clock(client), *await check_run(client, config)]
    finally:
        await client.aclose()
    return findings


# ── Redis ──


async def check_redis(client: RedisClient, config: RunConfig) -> list[Finding]:
    """That it answers, is new enough, keeps what it is given, and evicts nothing."""
    asked: Any = client.info()
    try:
        info: dict[str, Any] = await asked
    except (NoPermissionError, ResponseError) as error:
        advice = "give a config whose redis.url has the operator's user"
        return [Finding("redis", "warn", f"this user may not ask for its state ({error})", advice)]
    except AuthenticationError as error:
        advice = "correct redis.url, or redis.password_file"
        return [Finding("redis", "fail", f"refuses the user or password ({error})", advice)]
    except (RedisError, OSError) as error:
        return [Finding("redis", "fail", f"does not answer ({error})", "check redis.url, and that the server runs")]
    fsync = await _setting(client, "appendfsync")
    return [_version(info), _durability(info, fsync, config.replay.settle_s), _memory(info)]


def _version(info: dict[str, Any]) -> Finding:
    version = str(info.get("valkey_version") or info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_REDIS:
        return Finding("redis", "fail", f"version {version} is too old", "upgrade to 6.2 or newer")
    return Finding("redis", "ok", f"version {version}")


def _durability(info: dict[str, Any], fsync: str, settle_s: float) -> Finding:
    name = "durability"
    if not info.get("aof_enabled"):
        return Finding(name, "fail", "no append-only file: a restart loses the queue", "set appendonly yes")
    if info.get("aof_last_write_status", "ok") != "ok":
        return Finding(name, "fail", "the last write of the append-only file failed", "free its disk")
    if fsync == "no":
        return Finding(name, "warn", "appendfsync no: a crash may lose half a minute", "set appendfsync everysec")
    if fsync == "everysec" and settle_s < EVERYSEC_LOSS_S:
        text = f"append-only file, fsync every second, and replay.settle_s is {settle_s:g}"
        return Finding(name, "warn", text, "set replay.settle_s to 2 where its machine itself may go down")
    return Finding(name, "ok", f"append-only file, fsync {fsync or 'unknown'}")


def _memory(info: dict[str, Any]) -> Finding:
    policy, limit, used = info.get("maxmemory_policy", ""), int(info.get("maxmemory", 0)), int(info["used_memory"])
    if limit and policy != "noeviction":
        return Finding("memory", "fail", f"{policy} may evict prompts and groups", "set maxmemory-policy noeviction")
    if limit and used > 0.9 * limit:
        text = f"{used / limit:.0%} of maxmemory is used"
        return Finding("memory", "warn", text, "raise maxmemory, or lower replay.capacity_bytes")
    return Finding("memory", "ok", f"{used / 2**20:.0f} MiB used, {policy or 'no limit'}")


async def _setting(client: RedisClient, name: str) -> str:
    """Empty where this user, or a managed Redis, does not tell."""
    asked: Any = client.config_get(name)
    try:
        found = await asked
    except RedisError:
        return ""
    value = found.get(name, found.get(name.encode(), ""))
    return value.decode() if isinstance(value, bytes) else str(value)


async def check_clock(client: RedisClient) -> Finding:
    """Leases go by Redis' clock alone; ages of groups and traces also by this machine's."""
    asked: Any = client.time()
    started = time.time()
    seconds, microseconds = await asked
    away_s = int(seconds) + int(microseconds) / 1e6 - (started + time.time()) / 2
    text = f"{abs(away_s):.2f} s {'behind' if away_s > 0 else 'ahead of'} Redis'"
    if abs(away_s) < CLOCK_WARN_S:
        return Finding("clock", "ok", text)
    return Finding("clock", "fail" if abs(away_s) >= CLOCK_FAIL_S else "warn", text, "synchronise it (NTP)")


# ── the run ──


async def check_run(client: RedisClient, config: RunConfig) -> list[Finding]:
    """What the run's own numbers say."""
    try:
        error = (await RedisReplayQueue(client, config.run, config.replay).stat()).conservation_error
        servers = await Fleet(client, config.run).servers()
        ages_s = await Heartbeats(client, config.run).ages_s()
        policies = await PolicyRegistry(client, config.run).newest_first(None, LOOKED_BACK_VERSIONS)
    except (PenstockError, NotFound) as refused:
        return [Finding("run", "warn", f"cannot be looked into: {refused}", "use a user that may read the run's keys")]
    findings = [Finding("conservation", "ok", "nothing is lost")]
    if error:
        findings = [Finding("conservation", "fail", f"off by {error}", "see docs/runbooks.md#conservationbroken")]
    ages_s |= {server.server_id: server.heartbeat_age_ms / 1000 for server in servers}
    findings += [_heartbeat(component, age_s, config.replay.lease_ttl_s) for component, age_s in ages_s.items()]
    findings += [_listens(server.server_id, *server.address.rsplit(":", 1)) for server in servers]
    return [*findings, *_weights(servers, policies), _agreement(policies, config)]


def _heartbeat(component: str, age_s: float, limit_s: float) -> Finding:
    if age_s <= limit_s:
        return Finding("heartbeat", "ok", f"{component}, {age_s:.1f} s ago")
    return Finding("heartbeat", "fail", f"{component} has been silent for {age_s:.0f} s", "see its log; start it again")


def _weights(servers: list[ServerRecord], policies: list[policies_pb2.Policy]) -> Iterator[Finding]:
    """That servers hold, byte for byte, what the learner published."""
    digests = {policy.policy_version: policy.weights_digest for policy in policies}
    for server in servers:
        expected = digests.get(server.policy_version, "")
        if server.state in SERVING_STATES and server.weights_digest and expected:
            is_same = server.weights_digest == expected
            text = f"{server.server_id} {'has' if is_same else 'does not have'} version {server.policy_version} exactly"
            yield Finding("weights", "ok" if is_same else "fail", text, "" if is_same else "restart the server")


def _agreement(policies: list[policies_pb2.Policy], config: RunConfig) -> Finding:
    """`penstock_algo_logprob_mismatch_nats`, as the newest record that has it says."""
    name = "log-probs"
    found = next((policy for policy in policies if "logprob_mismatch" in policy.metrics), None)
    if found is None:
        return Finding(name, "ok", "no step yet that engine and learner can be compared by")
    mismatch, typical = found.metrics["logprob_mismatch"], TYPICAL_MISMATCH_NATS[config.model.dtype]
    limit = config.learner.max_logprob_mismatch_nats or float("inf")
    text = f"engine and learner differ by {mismatch:.2g} nats a token (version {found.policy_version})"
    if mismatch <= min(typical, limit):
        return Finding(name, "ok", text)
    return Finding(name, "fail" if mismatch > limit else "warn", text, "see docs/runbooks.md#traininfermismatch")


# ── this machine ──


def check_ports(config: RunConfig) -> list[Finding]:
    """What the parts said where they listen is listening; before a start, fixed ports are free."""
    findings = []
    for path in sorted(config.folder.glob("*.json")):
        fields = json.loads(path.read_text())
        if isinstance(fields, dict) and "host" in fields:
            ports = [value for name, value in fields.items() if name.endswith("port")]
            findings += [_listens(path.stem, fields["host"], port) for port in ports]
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


def _listens(part: str, host: str, port: int | str) -> Finding:
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S):
            return Finding("ports", "ok", f"{part} listens on {host}:{port}")
    except OSError as error:
        text = f"{part} does not answer on {host}:{port} ({error.strerror or error})"
        return Finding("ports", "fail", text, "start it, or open the way to it")


def check_disk(config: RunConfig) -> Finding:
    folder = next(path for path in (config.folder, *config.folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        text = f"{free / 2**30:.1f} GiB free under {folder}"
        return Finding("disk", "warn", text, "make room for checkpoints and snapshots, or move run_dir")
    return Finding("disk", "ok", f"{free / 2**30:.0f} GiB free under {folder}")


def check_gpus(config: RunConfig) -> list[Finding]:
    """How many there are for what the learner asks, and whether they are linked."""
    wanted = sum(role.num_ranks * role.gpus_per_rank for role in config.learner.needed_roles.values())
    names = _nvidia_smi("--query-gpu=name", "--format=csv,noheader")
    if not names:
        if wanted and not config.learner.ray_address:
            advice = "install the driver, or set learner.*.gpus_per_rank to 0"
            return [Finding("gpus", "fail", f"none here, and the learner asks for {wanted:g}", advice)]
        return [Finding("gpus", "ok", "none here, and none is asked for here")]
    found = f"{len(names)} x {names[0]}"
    if wanted > len(names) and not config.learner.ray_address:
        return [Finding("gpus", "fail", f"{found}, and the learner asks for {wanted:g}", "lower learner.*.num_ranks")]
    if len(names) == 1:
        return [Finding("gpus", "ok", found)]
    # A row has an X where the GPU meets itself; the head has none.
    rows = [
        cells for line in _nvidia_smi("topo", "-m") if "X" in (cells := line.split()) and cells[0].startswith("GPU")
    ]
    links = {cell for row in rows for cell in row[1 : len(names) + 1]} - {"X"}
    if links and all(link.startswith("NV") for link in links):
        return [Finding("gpus", "ok", f"{found}, linked by NVLink")]
    advice = "keep policy ranks and servers that share weights on GPUs that are linked"
    return [Finding("gpus", "warn", f"{found}, not all linked by NVLink ({', '.join(sorted(links))})", advice)]


def _nvidia_smi(*words: str) -> list[str]:
    """Its lines; none where there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
