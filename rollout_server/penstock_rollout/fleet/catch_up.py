"""Load the current version from a snapshot on the shared volume. This works without a learner."""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.errors import WeightPushFailed
from penstock.v1 import policies_pb2, weights_pb2
from penstock.weights.snapshot import read_published_manifest
from penstock_rollout.engines.engine import Engine

logger = logging.getLogger(__name__)


async def load_snapshot(engine: Engine, policy: policies_pb2.Policy, timeout_s: float) -> None:
    """Load a published version into the engine.

    Raises WeightPushFailed and changes nothing if the snapshot is missing or is not the one that was published."""
    folder = Path(policy.snapshot_path)
    snapshot = read_published_manifest(folder, policy.weights_digest)
    checksums = list(snapshot.bucket_checksums)
    if snapshot.manifest.policy_version != policy.policy_version:
        raise WeightPushFailed(f"{folder} is not the published version {policy.policy_version}")
    announcement = weights_pb2.AnnounceRequest(
        manifest=snapshot.manifest,
        transport="snapshot",
        rendezvous=str(folder),
        rank=1,
        world_size=2,
        deadline_s=timeout_s,
    )
    await engine.stage_weights(announcement)
    await engine.commit_weights(policy.policy_version, checksums, timeout_s)
    logger.info("loaded version %d from %s", policy.policy_version, folder)
