"""Snapshots of published versions: folders in the format of Hugging Face, from which any server can load a version."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection
from pathlib import Path

from penstock.config.run import RunConfig
from penstock.errors import DiskFull, PenstockError
from penstock.machine.disk_space import is_disk_full, measure_disk
from penstock.store.policies import PolicyRegistry
from penstock_learner.roles.actors.role_group import RoleGroup


class VersionSnapshots:
    """Has policy rank 0 write snapshots of staged versions, and keeps the newest ones and those that are in use."""

    def __init__(self, config: RunConfig, policy: RoleGroup, policies: PolicyRegistry) -> None:
        self.config = config
        self.policy = policy
        self.policies = policies
        self.written: set[int] = set()
        """Versions whose snapshots this learner has written."""
        self.last_step: int | None = None
        """The step of the newest snapshot that was due."""

    async def write_if_due(self, policy_version: int, step: int) -> Path | None:
        """Write a snapshot of the version if one is due: every `snapshot_every_steps`, and the first and last."""
        every, last = self.config.weights.snapshot_every_steps, self.last_step
        is_due = last is None or step // every > last // every or step == self.config.learner.num_steps
        if not is_due:
            return None
        target = await self.write(policy_version)
        self.last_step = step
        return target

    async def write(self, policy_version: int) -> Path:
        """Write a snapshot of a staged version, and remove those that are no longer needed."""
        folder = self.config.folder / "snapshots"
        target = folder / f"version-{policy_version:08d}"
        timeout_s = self.config.learner.rank_timeout_s
        try:
            await self.policy.call_beside("push", "write_snapshot", policy_version, target, timeout_s=timeout_s)
        except PenstockError as error:
            if not is_disk_full(error, folder):
                raise
            shutil.rmtree(target, ignore_errors=True)
            raise DiskFull(
                f"no space is left to write the snapshot of version {policy_version} ({measure_disk(folder)}); free "
                "space there, or lower weights.keep_snapshots, then start the learner again"
            ) from error
        self.written.add(policy_version)
        kept = await self.policies.kept_versions()
        on_disk = await asyncio.to_thread(_remove_old_snapshots, folder, self.config.weights.keep_snapshots, kept)
        await self.policies.record_snapshots(on_disk)
        await self.policies.forget_old(kept | set(on_disk))
        return target


def _remove_old_snapshots(folder: Path, num_newest: int, kept: Collection[int]) -> dict[int, str]:
    """Remove all snapshots but the newest ones and those of versions in `kept`. Returns the folders that remain, by
    version."""
    for old in sorted(folder.glob("version-*"))[:-num_newest]:
        if _version_of(old) not in kept:
            shutil.rmtree(old, ignore_errors=True)
    return {_version_of(snapshot): str(snapshot) for snapshot in folder.glob("version-*")}


def _version_of(snapshot: Path) -> int:
    """The version in the name of a snapshot's folder; -1 if there is none."""
    number = snapshot.name.removeprefix("version-")
    return int(number) if number.isdecimal() else -1
