"""The cost of checksums and of looking for numbers that are not finite, on 1 GB of weights.

make bench-checkpoints
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from harness import Bar, alternate, make_parser, median_ratio, report, sized
from penstock.weights.transports import Deadline, TensorShape, build_manifest
from penstock_learner.checkpoints import FileRecord, find_damage
from penstock_learner.shards import HashingWriter
from penstock_learner.weights.staging import HostBuckets, StagedVersion, first_nonfinite

NUM_ROUNDS = sized(5, 1)
SHAPE = sized((4096, 1024), (64, 64))
NUM_TENSORS = sized(60, 3)
NUM_BYTES = NUM_TENSORS * SHAPE[0] * SHAPE[1] * 4
BUCKET_BYTES = 64 * 2**20


class UncheckedVersion(StagedVersion):
    """A version that is hashed, but not checked."""

    def _first_nonfinite(self, index: int, bucket: torch.Tensor) -> str:
        return ""


def rate_of(call: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        call()
        return NUM_BYTES / 1e9 / (time.perf_counter() - started)

    return run


def write(state: dict[str, Any], writer: FileSystemWriter) -> None:
    save(state, storage_writer=writer, no_dist=True)


def verify_and_load(folder: Path, files: dict[str, FileRecord], state: dict[str, Any]) -> None:
    assert find_damage(folder, files) == []
    load(state, checkpoint_id=folder, no_dist=True)


def stage(kind: type[StagedVersion], weights: dict[str, torch.Tensor], memory: HostBuckets) -> None:
    shapes = [TensorShape(name, "BF16", SHAPE) for name in weights]
    staged = kind(build_manifest("bench", 1, 1, shapes, BUCKET_BYTES), memory)
    for name, weight in weights.items():
        staged.put(name, weight)
    staged.checksums(Deadline(60, "hashing"))


def main() -> int:
    make_parser().parse_args()
    warnings.simplefilter("ignore", UserWarning)  # DCP warns that one process saves and loads, and overwrites
    torch.set_num_threads(1)
    weights = {f"layer.{index}": torch.randn(SHAPE) for index in range(NUM_TENSORS)}
    state: dict[str, Any] = {"model": weights}
    memory = HostBuckets([BUCKET_BYTES] * (-(-NUM_BYTES // 2 // BUCKET_BYTES)))
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        kept = HashingWriter(folder / "kept")
        write(state, kept)
        measured = alternate(
            {
                "save with checksums": rate_of(lambda: write(state, HashingWriter(folder / "hashed"))),
                "save": rate_of(lambda: write(state, FileSystemWriter(folder / "plain"))),
                "verify and load": rate_of(lambda: verify_and_load(folder / "kept", kept.records, state)),
                "load": rate_of(lambda: load(state, checkpoint_id=folder / "kept", no_dist=True)),
                "stage and check": rate_of(lambda: stage(StagedVersion, weights, memory)),
                "stage": rate_of(lambda: stage(UncheckedVersion, weights, memory)),
                "check all shards": rate_of(lambda: first_nonfinite(weights.items())),
            },
            NUM_ROUNDS,
            "GB/s",
        )
    finally:
        shutil.rmtree(folder)

    def share(ours: str, limit: str) -> float:
        return median_ratio(measured[ours], measured[limit])

    bars = [
        Bar("save, with checksums / without", share("save with checksums", "save"), 0.85),
        Bar("load, verified / not verified", share("verify and load", "load"), 0.7),
        Bar("staging in bfloat16, checked / not checked", share("stage and check", "stage"), 0.8),
        Bar("looking for non-finite shards / saving them", share("check all shards", "save"), 3.0),
    ]
    title = f"{NUM_BYTES / 1e9:.1f} GB, written and loaded by one thread"
    return 0 if report("checkpoints", title, list(measured.values()), bars) else 1


if __name__ == "__main__":
    raise SystemExit(main())
