"""A rewind loads a snapshot only if every byte is as it was published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.config.loading import validate
from penstock.errors import WeightPushFailed
from penstock.weights.snapshot import FILE_NAME
from penstock.weights.transports import Deadline, weights_digest
from penstock_learner.roles.policy import PolicyWorker
from support.learner_ranks import make_rank, with_model

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_damaged_snapshot_changes_nothing(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    config = validate(with_model({"run_dir": str(tmp_path)}, tiny_models["policy"]), "test")
    worker = make_rank(PolicyWorker, config)
    assert worker.publisher is not None
    worker.gather_weights(1, 1, [])
    folder = tmp_path / "version-00000001"
    worker.publisher.write_snapshot(1, folder)
    digest = weights_digest(worker.publisher.staged[1].checksums(Deadline(10, "hashing")))
    with torch.no_grad():
        for parameter in worker.trained.parameters():
            parameter.fill_(3.0)
    content = bytearray((folder / FILE_NAME).read_bytes())
    content[-1] ^= 0x40
    (folder / FILE_NAME).write_bytes(content)
    with pytest.raises(WeightPushFailed, match=r"version-00000001/model.safetensors is damaged: expected checksum"):
        worker.load_snapshot(folder, digest)
    assert all(bool((parameter == 3.0).all()) for parameter in worker.trained.parameters())
    content[-1] ^= 0x40
    (folder / FILE_NAME).write_bytes(content)
    worker.load_snapshot(folder, digest)
    assert not any(bool((parameter == 3.0).all()) for parameter in worker.trained.parameters())
