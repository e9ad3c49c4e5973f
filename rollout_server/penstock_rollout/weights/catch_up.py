"""A server's own way to the current version: from a snapshot on the volume, with or without a learner."""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.errors import WeightPushFailed
from penstock.v1 import policies_pb2
from penstock.weights.checksums import weights_digest
from penstock.weights.snapshot import read_manifest
from penstock_rollout.engines.engine import Engine, StageRequest

logger = logging.getLogger(__name__)


async def load_snapshot(engine: Engine, policy: policies_pb2.Policy, timeout_s: float) -> None:
    """Bring the engine to a published version that was kept. Raises WeightPushFailed, and changes nothing, when the
    snapshot is not there or is not the one that was published."""
    folder = Path(policy.snapshot_path)
    kept = read_manifest(folder)
    checksums = list(kept.bucket_checksums)
    if kept.manifest.policy_version != policy.policy_version or weights_digest(checksums) != policy.weights_digest:
        raise WeightPushFailed(f"{folder} is not the published version {policy.policy_version}")
    request = StageRequest(kept.manifest, "snapshot", str(folder), rank=1, world_size=2, timeout_s=timeout_s)
    await engine.stage_weights(request)
    await engine.commit_weights(policy.policy_version, checksums, timeout_s)
    logger.info("loaded version %d from %s", policy.policy_version, folder)
