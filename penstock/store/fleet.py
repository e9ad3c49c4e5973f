"""The fleet: its rollout servers with their state in the weight group, the versions they serve, and operators' orders.

Redis holds one record per server. These are the states, and who moves a server between them:

    JOINING ──(server: engine is up)──► STALE ──(server: loaded the current version)──► READY
    READY   ──(publisher: announced)──► LOADING ──(publisher: committed)──► READY
    any     ──(publisher: missed a deadline or failed)──► EVICTED ──(server: sees it, reloads)──► STALE
    READY, LOADING ──(server: behind the published version, or held at another)──► STALE

A server that ends leaves. One that died stays, with its last heartbeat, until the learner forgets it.

The policy registry has a record for each of the newest versions that a run has published, and the operators' marks:
which version is promoted, which are retired, and which names (API keys, sessions, evaluations, servers) are pinned. The
learner's publish call writes the record in the same script that makes the version current. A record never changes. The
learner removes old records, except those of versions with a mark or a snapshot.

The gateway writes operators' orders to a run; the servers and the learner follow them:

    paused         no prompt is leased (lease.lua)
    stop_term      a learner of this term or an earlier one ends after its step and writes a checkpoint
    held_version   servers load this version's snapshot and stay there; the learner pushes nothing
    num_rewinds    how many rewinds were ordered; for each one the learner rewinds to the weights of rewind_version
    drained        servers that lease nothing (lease.lua)

The queue itself pauses the leasing of a server while everything that it tries fails (lua/prelude_breaker.lua). The
learner keeps servers whose log-probs disagree with its own in quarantine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, cast

from penstock.errors import NotFound
from penstock.store.redis_client import RunRecords, guarded, read_known_fields, read_record, read_rows
from penstock.v1 import policies_pb2


@dataclass(frozen=True)
class Quarantine:
    """Why a server is in quarantine, and how far it is on its way back. Its log-probs disagree with the learner's, so
    nothing that it sampled is trained. It notices nothing: it leases less, and is sent a version that it seems to have.

        serving ──(log-probs disagree)──► draining ──(weights loaded wholly)──► probed ──(probes agree)──► serving
                                             ▲                                    │
                                             └──────(probes disagree)─────────────┘

    While it drains, it leases nothing. While it is probed, it leases a few prompts, whose groups are compared. A group
    that it sampled in quarantine and that is not a probe expires: its prompt is leased again and loses no attempt."""

    server_id: str
    mismatch_nats: float
    """Mean difference between its log-probs and the learner's when they were compared last."""
    limit_nats: float
    """The largest difference that would have been allowed."""
    policy_version: int
    """The learner's version when they were compared."""
    since_ms: int
    """When the quarantine began, by Redis' clock."""
    num_reloads: int = 0
    """How often its weights were loaded wholly since."""
    probes_left: int = 0
    """Prompts that it may still lease as probes. lease.lua counts them down."""
    probe_ids: frozenset[int] = field(default_factory=frozenset)
    """Prompts that it leased as probes. lease.lua adds them."""

    def to_json(self) -> str:
        """The stored form, which lease.lua reads and writes."""
        return json.dumps(asdict(self) | {"probe_ids": " ".join(map(str, sorted(self.probe_ids)))})

    @classmethod
    def from_json(cls, text: str | bytes) -> Quarantine:
        fields = json.loads(text)
        fields["probe_ids"] = frozenset(map(int, fields.get("probe_ids", "").split()))
        return read_known_fields(cls, fields)


class Quarantines(RunRecords):
    """The records of one run. Only the learner of the current term changes them."""

    async def read(self) -> dict[str, Quarantine]:
        records = await self.hash_of(self.keys.quarantined)
        return {server: Quarantine.from_json(text) for server, text in records.items()}

    async def put(self, quarantine: Quarantine, term: int) -> None:
        """Store the record, unless the server has left. Raises Fenced once a newer term was taken."""
        await self.call("set_quarantine", term, quarantine.server_id, quarantine.to_json())

    async def end(self, server_id: str, term: int) -> None:
        """Remove the record. Raises Fenced once a newer term was taken."""
        await self.call("set_quarantine", term, server_id, "")


ServerState = Literal["JOINING", "READY", "LOADING", "STALE", "EVICTED"]
SERVING_STATES: tuple[ServerState, ...] = ("READY", "LOADING")


@dataclass(frozen=True)
class ServerRecord:
    """A rollout server's report of itself, and its state."""

    server_id: str
    address: str
    """host:port of its internal gRPC listener."""
    engine: str
    state: ServerState = "JOINING"
    policy_version: int = -1
    weights_digest: str = ""
    """Digest of the weights as the server received them. It equals the policy's digest exactly when every byte does.
    Empty while the server serves the model folder."""
    devices: tuple[str, ...] = ("cpu",)
    """Where each worker of its engine holds the weights: `cpu`, or a GPU's UUID."""
    host_id: str = ""
    """Equal for processes that can map each other's memory (penstock.weights.transports)."""
    transports: tuple[str, ...] = ("gloo", "snapshot")
    """Transports by which it can receive weights."""
    nccl_version: str = ""
    """Version of its NCCL library. Empty if it cannot receive by `nccl`."""
    running_groups: int = 0
    scoring_groups: int = 0
    """Part of the running groups: their samples are finished and are being scored."""
    running_requests: int = 0
    waiting_requests: int = 0
    """Requests that wait inside the engine."""
    kv_cache_usage: float = 0.0
    """0 to 1."""
    generating_s: float = 0.0
    """Seconds since its start in which its engine had at least one request."""
    heartbeat_age_ms: int = 0
    """Time since its last heartbeat when the record was read, by Redis' clock."""


@dataclass(frozen=True)
class Reported:
    """What a server learns from its heartbeat."""

    state: ServerState | None
    """None once the server was removed, EVICTED when it must reload."""
    held_version: int | None
    """The version that the whole run is held at, or else the one that this server is pinned to."""
    current_version: int = 0
    """The version that was published last; 0, the model folder, before the first."""


class Fleet(RunRecords):
    """Registry of the rollout servers of one run."""

    async def join(self, record: ServerRecord) -> None:
        await self.report(record)
        await self.set_state(record.server_id, "JOINING")

    async def report(self, record: ServerRecord) -> Reported:
        """Store a server's heartbeat. It is one call, because every server makes it twice a second."""
        fields = asdict(record)
        del fields["state"], fields["heartbeat_age_ms"]
        answer = read_record(await self.call("report_server", record.server_id, json.dumps(fields)))
        state = cast("ServerState | None", answer["state"] and answer["state"].decode())
        held = answer["held_version"] and int(answer["held_version"])
        return Reported(state, held, int(answer["current_version"] or 0))

    async def set_state(self, server_id: str, state: ServerState, term: int | None = None) -> None:
        await self.set_states([server_id], state, term)

    async def set_states(self, server_ids: Sequence[str], state: ServerState, term: int | None = None) -> None:
        """Move servers to a state. A publisher gives its term: the call raises Fenced and changes nothing once a newer
        term was taken, and it does nothing for a server that has left."""
        if server_ids:
            await self.call("set_server_state", state, "" if term is None else term, *server_ids)

    async def leave(self, server_id: str) -> None:
        """Forget a server, with its breaker and its quarantine."""
        await self.call("leave_server", server_id)

    async def forget_silent(self, max_silence_s: float, term: int) -> dict[str, float]:
        """Forget the servers that sent no heartbeat for `max_silence_s`. Returns the silence of each in seconds. Raises
        Fenced once a newer term was taken."""
        rows = read_rows(await self.call("forget_silent_servers", term, int(1000 * max_silence_s)))
        return {row["server_id"].decode(): row["silence_ms"] / 1000 for row in rows}

    async def servers(self) -> list[ServerRecord]:
        """Each server's record, with its state and the age of its heartbeat."""
        records = await self.hash_of(self.keys.servers)
        states, now_ms, found = await self.hash_of(self.keys.server_states), await self.now_ms(), []
        for server_id, text in records.items():
            fields = json.loads(text)
            fields["heartbeat_age_ms"] = max(0, now_ms - fields["heartbeat_ms"])
            fields["state"] = states.get(server_id, b"JOINING").decode()
            found.append(read_known_fields(ServerRecord, fields))
        return found

    async def num_servers(self) -> int:
        return int(await guarded(self.client.hlen(self.keys.servers)))

    async def num_changes(self) -> int:
        """How often a server joined, left, or changed its state or version."""
        return await self.number_of(self.keys.counters, "fleet_changes") or 0

    async def quarantined(self) -> frozenset[str]:
        """Servers whose samples must not be used."""
        return frozenset(await self.hash_of(self.keys.quarantined))

    async def term(self) -> int:
        """Term of the learner that may publish; 0 before the first learner."""
        return await self.number_of(self.keys.counters, "term") or 0


@dataclass(frozen=True, eq=False)
class FleetReading:
    """All servers at one moment."""

    servers: Sequence[ServerRecord]
    num_changes: int
    """Changes of the fleet before the servers were read. A change since then makes the next call read them again."""
    read_at: float
    """When the reading began, by the clock of time.monotonic."""

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.read_at

    def first_silence_s(self, max_silence_s: float) -> float:
        """Seconds until a serving server may have been silent for `max_silence_s`. Not positive if one may be now."""
        ages_ms = (server.heartbeat_age_ms for server in self.servers if server.state in SERVING_STATES)
        return max_silence_s - max(ages_ms, default=0) / 1000 - self.age_s


class FleetView:
    """The newest reading of a fleet. Concurrent callers share one.

    `current` reads one number of Redis, which counts the servers that joined, left, or changed their state or version.
    The fleet is read again only if the number has changed, so a view never shows a state or a version that a server has
    left, or if the reading is `max_age_s` old, so loads and heartbeats are at most that old.

    With `rarely_used_age_s`, an old reading is kept until it was used as often as it has servers, or until it is
    `rarely_used_age_s` old. So a call costs the reading of one server at most, in any fleet."""

    def __init__(self, fleet: Fleet, max_age_s: float, rarely_used_age_s: float | None = None) -> None:
        self.fleet = fleet
        self.max_age_s = max_age_s
        self.rarely_used_age_s = max_age_s if rarely_used_age_s is None else rarely_used_age_s
        self._reading: FleetReading | None = None
        self._num_uses = 0
        """How often the reading was returned."""
        self._lock = asyncio.Lock()

    async def current(self) -> FleetReading:
        """The last reading if it still holds, otherwise a new one."""
        asked_at, num_changes = time.monotonic(), await self.fleet.num_changes()
        reading = self._reading
        if reading is not None and reading.num_changes == num_changes:
            is_rarely_used = self._num_uses < len(reading.servers)
            if reading.age_s < (self.rarely_used_age_s if is_rarely_used else self.max_age_s):
                self._num_uses += 1
                return reading
        return await self._read(asked_at)

    async def read(self) -> FleetReading:
        """A reading that began after this call."""
        return await self._read(time.monotonic())

    async def _read(self, asked_at: float) -> FleetReading:
        async with self._lock:
            if self._reading is None or self._reading.read_at < asked_at:
                read_at, num_changes = time.monotonic(), await self.fleet.num_changes()
                self._reading = FleetReading(await self.fleet.servers(), num_changes, read_at)
                self._num_uses = 0
            return self._reading


# ── the policy registry ──

NUM_LISTED = 1000
"""Number of versions whose records are kept."""


class PolicyRegistry(RunRecords):
    """Records and marks of one run's policy versions."""

    async def get(self, policy_version: int | None = None) -> policies_pb2.Policy:
        """The record of a version, or of the current one."""
        if policy_version is None:
            policy_version = await self.number_of(self.keys.counters, "policy_version")
            if policy_version is None:
                raise NotFound("no policy version was published yet; the learner has not started")
        record = await guarded(self.client.hget(self.keys.policies, policy_version))
        if record is None:
            raise NotFound(f"policy version {policy_version} was never published, or is too old to be listed")
        policy: policies_pb2.Policy = policies_pb2.Policy.FromString(record)
        if later := await guarded(self.client.hget(self.keys.snapshots, policy_version)):
            policy.snapshot_path = later.decode()  # it was made after the version was published
        return policy

    async def newest_first(self, before: int | None, limit: int) -> list[policies_pb2.Policy]:
        """Up to `limit` records with a version below `before`, or from the newest if it is None."""
        top = "+inf" if before is None else f"({before}"
        versions = await guarded(
            self.client.zrevrangebyscore(self.keys.policy_versions, top, "-inf", start=0, num=limit)
        )
        if not versions:
            return []
        records = await guarded(self.client.hmget(self.keys.policies, versions))
        return [policies_pb2.Policy.FromString(record) for record in records if record is not None]

    async def forget_old(self, kept: Collection[int]) -> None:
        """Remove the records of all but the newest NUM_LISTED versions and those in `kept`. The numbers of a step make
        a record a kilobyte, and a run may publish a version every second."""
        old = await guarded(self.client.zrange(self.keys.policy_versions, 0, -NUM_LISTED - 1))
        if forgotten := [version for version in old if int(version) not in kept]:
            await guarded(self.client.zrem(self.keys.policy_versions, *forgotten))
            await guarded(self.client.hdel(self.keys.policies, *forgotten))

    async def add_marks(self, policies: Iterable[policies_pb2.Policy]) -> None:
        """Fill in the state, the pins, whether servers are held at the version, and whether its snapshot exists."""
        promoted, held = await guarded(self.client.hmget(self.keys.counters, ("promoted_version", "held_version")))
        retired = {int(version) for version in await guarded(self.client.smembers(self.keys.retired_versions))}
        pins, snapshots = await self.pins(), await self.snapshots()
        for policy in policies:
            version = policy.policy_version
            if version in retired:
                policy.state = policies_pb2.Policy.RETIRED
            elif promoted and int(promoted) == version:
                policy.state = policies_pb2.Policy.PROMOTED
            if snapshots:  # a record also names a snapshot that was removed since
                policy.snapshot_path = snapshots.get(version, "")
            policy.is_held = bool(held) and int(held) == version
            policy.pins[:] = sorted(name for name, pinned in pins.items() if pinned == version)

    async def snapshots(self) -> dict[int, str]:
        """Folder of each snapshot that exists, by version. Empty if the learner has recorded none."""
        fields = await self.hash_of(self.keys.snapshots)
        return {int(version): folder.decode() for version, folder in fields.items()}

    async def record_snapshots(self, snapshots: Mapping[int, str]) -> None:
        """Record which snapshots exist. The learner calls it after each change."""
        removed = (await self.snapshots()).keys() - snapshots.keys()
        if snapshots:
            fields = {str(version): folder for version, folder in snapshots.items()}
            await guarded(self.client.hset(self.keys.snapshots, mapping=fields))
        if removed:
            await guarded(self.client.hdel(self.keys.snapshots, *map(str, removed)))

    async def promoted_version(self) -> int | None:
        return await self.number_of(self.keys.counters, "promoted_version")

    async def promote(self, policy_version: int) -> None:
        await guarded(self.client.hset(self.keys.counters, "promoted_version", policy_version))

    async def retire(self, policy_version: int) -> None:
        await guarded(self.client.sadd(self.keys.retired_versions, policy_version))

    async def pin(self, name: str, policy_version: int) -> None:
        await guarded(self.client.hset(self.keys.policy_pins, name, policy_version))

    async def unpin(self, name: str) -> bool:
        return bool(await guarded(self.client.hdel(self.keys.policy_pins, name)))

    async def pins(self) -> dict[str, int]:
        return {name: int(version) for name, version in (await self.hash_of(self.keys.policy_pins)).items()}

    async def kept_versions(self) -> set[int]:
        """Versions that are promoted, held, pinned or rewound to: their snapshots may still be needed."""
        fields = ("promoted_version", "held_version", "rewind_version")
        marked = await guarded(self.client.hmget(self.keys.counters, fields))
        return {int(version) for version in marked if version} | set((await self.pins()).values())


# ── operators' orders ──


@dataclass(frozen=True)
class OpenBreaker:
    """An open breaker, as operators see it. replay/lua/prelude_breaker.lua describes when it opens and closes."""

    server_id: str
    reason: str
    """Reason of the newest failure."""
    num_failures: int
    """Leases that failed since the server's last success."""
    probe_in_s: float
    """Seconds until the next probe."""


@dataclass(frozen=True)
class Orders:
    is_paused: bool = False
    stop_term: int = 0
    held_version: int | None = None
    term: int = 0
    num_rewinds: int = 0
    rewind_version: int = 0
    """Version of the newest order to rewind. A release does not change it."""

    @property
    def is_stopped(self) -> bool:
        """Whether the current learner, if there is one, was ordered to end."""
        return self.is_paused and self.stop_term >= self.term > 0


class RunControl(RunRecords):
    """Orders of one run. Each order is one write, and repeating it changes nothing."""

    async def orders(self) -> Orders:
        fields = ("paused", "held_version", "stop_term", "term", "num_rewinds", "rewind_version")
        paused, held, *numbers = await guarded(self.client.hmget(self.keys.counters, fields))
        stop_term, term, num_rewinds, version = (int(number or 0) for number in numbers)
        return Orders(paused == b"1", stop_term, int(held) if held else None, term, num_rewinds, version)

    async def pause(self, reason: str = "") -> None:
        """Pause leasing. A run that pauses itself gives the reason, which stays until the run is resumed."""
        if reason:
            await guarded(self.client.set(self.keys.pause_reason, reason))
        await self._set(paused=1)

    async def pause_reason(self) -> str:
        """Why the run paused itself; empty if it did not."""
        reason: bytes | None = await guarded(self.client.get(self.keys.pause_reason))
        return reason.decode() if reason else ""

    async def resume(self) -> None:
        """End a pause, close every breaker, so that all servers lease prompts again, and remove the notices."""
        await guarded(self.client.unlink(self.keys.pause_reason, self.keys.notices, self.keys.breakers))
        await self._set(paused=0)

    async def open_breakers(self) -> list[OpenBreaker]:
        """Servers whose leasing is paused because everything they try fails."""
        records = await self.hash_of(self.keys.breakers)
        if not records:
            return []
        now_ms, found = await self.now_ms(), []
        for server_id, text in records.items():
            record = json.loads(text)
            if int(record["opened_ms"]):
                probe_in_s = max(0, int(record["probe_ms"]) - now_ms) / 1000
                found.append(OpenBreaker(server_id, str(record["reason"]), int(record["failures"]), probe_in_s))
        return found

    async def quarantines(self) -> dict[str, Quarantine]:
        """Servers whose groups are not trained because their log-probs disagree with the learner's."""
        return await Quarantines(self.client, self.run).read()

    async def stop(self) -> None:
        """Pause the run and end the learner of the current term. One that starts later takes a new term and runs."""
        await self._set(paused=1, stop_term=(await self.orders()).term)

    async def hold(self, policy_version: int) -> None:
        await self.call("hold_version", policy_version)

    async def release(self) -> None:
        await guarded(self.client.hdel(self.keys.counters, "held_version"))

    async def drain(self, server_id: str) -> None:
        await guarded(self.client.sadd(self.keys.drained, server_id))

    async def undrain(self, server_id: str) -> None:
        await guarded(self.client.srem(self.keys.drained, server_id))

    async def drained(self) -> frozenset[str]:
        return frozenset(name.decode() for name in await guarded(self.client.smembers(self.keys.drained)))

    async def _set(self, **fields: int) -> None:
        await guarded(self.client.hset(self.keys.counters, mapping=fields))
