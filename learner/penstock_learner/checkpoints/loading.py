"""Loading checkpoints: every file is compared with the manifest before a role changes.

Which checkpoint is loaded, and which one if that is damaged, is decided in penstock_learner.loop.take_over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import CheckpointDamaged, ProcessDied, RoleDied
from penstock_learner.checkpoint_files import FileRecord, find_damage
from penstock_learner.checkpoints.checkpoint import read_checksums, shards_folder
from penstock_learner.roles.role_group import RoleGroup, gather_all

logger = logging.getLogger(__name__)


async def load_checkpoint(path: Path, trained: Mapping[str, RoleGroup]) -> None:
    """Verify a checkpoint, then restore the trained roles from it.

    Raises CheckpointDamaged if a file is damaged; the roles are unchanged then. It raises the same for a checkpoint
    without checksums that cannot be loaded, or whose weights are not finite; the roles must be restored again then."""
    files = await asyncio.to_thread(checksums_of, path)
    await _verify(path, files, trained)
    try:
        await gather_all(*(role.call_all("restore", shards_folder(path, name)) for name, role in trained.items()))
    except ProcessDied as error:
        if files or isinstance(error, RoleDied):
            raise
        raise CheckpointDamaged(f"{path} cannot be loaded: {error}") from error


async def _verify(path: Path, files: Mapping[str, FileRecord], trained: Mapping[str, RoleGroup]) -> None:
    """Compare the files with their checksums. All ranks of the roles share them."""
    ranks = [(role, rank) for role in trained.values() for rank in range(role.num_ranks)]
    shares = [dict(sorted(files.items())[index :: len(ranks)]) for index in range(len(ranks))]
    found = await gather_all(
        *(role.call_rank(rank, "find_damage", path, share) for (role, rank), share in zip(ranks, shares, strict=True))
    )
    _raise_if_damaged([damage for of_rank in found for damage in of_rank])


def verify_in_this_process(path: Path) -> None:
    """Compare every file with the manifest, without ranks. Raises CheckpointDamaged. Blocks."""
    _raise_if_damaged(find_damage(path, checksums_of(path)))


def checksums_of(path: Path) -> dict[str, FileRecord]:
    """The checksums of a checkpoint's files. Empty, with a warning, if an older version of Penstock wrote it."""
    files = read_checksums(path)
    if not files:
        logger.warning("checkpoint %s has no checksums, because an older version wrote it; it is not verified", path)
    return files


def _raise_if_damaged(damages: list[str]) -> None:
    if damages:
        more = f" (and {len(damages) - 1} more files)" if len(damages) > 1 else ""
        raise CheckpointDamaged(damages[0] + more)
