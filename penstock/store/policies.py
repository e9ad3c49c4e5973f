"""The policy registry: a record for each of the newest versions that a run has published, and the operators' marks.

The learner's publish call writes the record in the same script that makes the version current. A record never changes.
The learner removes old records, except those of versions with a mark or a snapshot.
Marks are stored with it: which version is promoted, which are retired, and which names (API keys, sessions,
evaluations, servers) are pinned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from penstock.errors import NotFound
from penstock.store.redis_client import RunRecords, guarded
from penstock.v1 import policies_pb2

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

    async def pinned_version(self, name: str) -> int | None:
        return await self.number_of(self.keys.policy_pins, name)

    async def kept_versions(self) -> set[int]:
        """Versions that are promoted, held, pinned or rewound to: their snapshots may still be needed."""
        fields = ("promoted_version", "held_version", "rewind_version")
        marked = await guarded(self.client.hmget(self.keys.counters, fields))
        return {int(version) for version in marked if version} | set((await self.pins()).values())
