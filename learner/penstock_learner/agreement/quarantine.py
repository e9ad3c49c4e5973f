"""The learner's side of a quarantine: who is in it, which groups it refuses, and when weights are loaded again.

penstock/store/quarantine.py draws the phases. The servers' weights are loaded by loop/publication.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from penstock.store.fleet import ServerRecord
from penstock.store.quarantine import Quarantine, Quarantines
from penstock.trajectory import Group
from penstock_learner.agreement.comparison import Verdict

logger = logging.getLogger(__name__)
NUM_PROBES = 2
"""Groups that a server samples after its weights were loaded, to be compared."""
DRAIN_TIMEOUT_S = 60.0
"""Longest wait for a server's running groups before its weights are loaded. These groups are refused in any case."""
PROBE_TIMEOUT_S = 300.0
"""Time after which a server whose probes were not compared is loaded and probed again."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 10.0, 300.0
"""Time until weights are loaded again after the first probes that disagreed, and at most."""


class ServerQuarantine:
    """The quarantines of a run during one term. Its records in Redis outlive the learner."""

    def __init__(self, store: Quarantines, term: int) -> None:
        self.store = store
        self.term = term
        self.records: dict[str, Quarantine] = {}
        self._changing = asyncio.Lock()
        """Held while Redis and `records` are made equal, so that neither misses a change of the other."""
        self._load_after: dict[str, float] = {}
        """When the weights of a server may be loaded at the earliest, if it must wait."""
        self._drained_by: dict[str, float] = {}
        """When the weights of a server are loaded even if groups are still running there."""
        self._trusted_from: dict[str, int] = {}
        """The version that a server had loaded wholly when its quarantine ended. What it sampled with an older one may
        still arrive."""
        self._loaded_version: dict[str, int] = {}

    async def read(self) -> None:
        """Read the records, with the probes that were leased since. A server that left the fleet has none."""
        async with self._changing:
            self.records = await self.store.read()
        for times in (self._load_after, self._drained_by):
            for gone in times.keys() - self.records.keys():
                del times[gone]

    async def end_all(self) -> None:
        """Let all servers serve again, because nobody compares them any more."""
        await self.read()
        for server_id in list(self.records):
            await self.end(server_id)

    def holds(self, server_id: str) -> bool:
        return server_id in self.records

    async def refuses(self, group: Group) -> bool:
        """Whether a server in quarantine sampled a part of the group, other than as a probe, or a server that left it
        sampled a part with the weights that it had before."""
        servers = {group.server_id, *(name for trajectory in group.trajectories for name in trajectory.server_ids)}
        if any(group.min_version < self._trusted_from.get(name, 0) for name in servers if not self.holds(name)):
            return True
        if not any(map(self.holds, servers)):
            return False
        await self.read()
        held = [record for name in servers if (record := self.records.get(name)) is not None]
        return any(group.prompt_id not in record.probe_ids for record in held)

    async def begin(self, verdict: Verdict, policy_version: int) -> None:
        """Put a server into quarantine, or note that its probes disagreed too."""
        before = self.records.get(verdict.server_id)
        record = Quarantine(
            verdict.server_id,
            verdict.mismatch_nats,
            verdict.limit_nats,
            policy_version,
            since_ms=before.since_ms if before else await self.store.now_ms(),
            num_reloads=before.num_reloads if before else 0,
        )
        if record.num_reloads:
            backoff_s = min(FIRST_BACKOFF_S * 2.0 ** (record.num_reloads - 1), MAX_BACKOFF_S)
            self._load_after[verdict.server_id] = time.monotonic() + backoff_s
        else:
            self._load_after.pop(verdict.server_id, None)
        self._drained_by[verdict.server_id] = time.monotonic() + DRAIN_TIMEOUT_S
        logger.error(
            "%s is in quarantine: its log-probs differ by %.3g nats per token, more than %.3g (version %d, weights "
            "loaded again %d times); its groups are not trained",
            record.server_id, record.mismatch_nats, record.limit_nats, policy_version, record.num_reloads,
        )  # fmt: skip
        await self._put(record)

    async def end(self, server_id: str) -> None:
        """Let the server serve again."""
        logger.warning("%s leaves the quarantine, and its groups are trained again", server_id)
        async with self._changing:
            await self.store.end(server_id, self.term)
            self.records.pop(server_id, None)
        if server_id in self._loaded_version:
            self._trusted_from[server_id] = self._loaded_version.pop(server_id)
        self._load_after.pop(server_id, None)
        self._drained_by.pop(server_id, None)

    async def probe_again(self, server_id: str) -> None:
        """Ask for new probes, because the last ones could not be compared."""
        if (record := self.records.get(server_id)) is not None:
            await self._put(replace(record, probes_left=NUM_PROBES, probe_ids=frozenset()))

    async def one_more_probe(self, group: Group) -> None:
        """Ask for another probe if this group was one that will not be compared."""
        if self.holds(group.server_id):
            await self.read()
            if (record := self.records.get(group.server_id)) is not None:
                await self._put(replace(record, probes_left=record.probes_left + 1))

    async def loaded(self, server_id: str, policy_version: int, num_probes: int = NUM_PROBES) -> None:
        """Note that the server has loaded this version wholly. It is probed next."""
        if (record := self.records.get(server_id)) is None:
            return
        logger.info("%s has loaded its weights again; %d groups of it will be compared", server_id, num_probes)
        self._load_after[server_id] = time.monotonic() + PROBE_TIMEOUT_S
        self._loaded_version[server_id] = policy_version
        await self._put(
            replace(record, num_reloads=record.num_reloads + 1, probes_left=num_probes, probe_ids=frozenset())
        )

    def awaits_load(self, server_id: str) -> bool:
        """Whether the server takes part in no push until its weights were loaded again."""
        record = self.records.get(server_id)
        return record is not None and not record.probes_left and not record.probe_ids

    def is_due(self, server: ServerRecord) -> bool:
        """Whether the weights of this server should be loaded now."""
        if not self.holds(server.server_id):
            return False
        now = time.monotonic()
        is_drained = server.running_groups == 0 or now >= self._drained_by.get(server.server_id, 0.0)
        return is_drained and now >= self._load_after.get(server.server_id, 0.0)

    async def _put(self, record: Quarantine) -> None:
        async with self._changing:
            await self.store.put(record, self.term)
            self.records[record.server_id] = record
