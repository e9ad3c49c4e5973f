"""Starts the ranks of a loading benchmark's job, and reads what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BOUND = 1.15
"""A rank may need this many times its part of the model, and one layer."""


@dataclass(frozen=True)
class Job:
    """What a group of ranks does."""

    folder: str
    work: str
    """Folder for the rendezvous and the checkpoint."""
    name: str
    num_ranks: int
    phases: tuple[str, ...]
    """Any of `check`, `step`, `gather`, `push`, `save` and `restore`, after loading."""
    way: str = "ours"
    """`naive` loads the whole model in every rank, moves it to the device, and then shards it."""
    master_dtype: str = "float32"
    micro_batch_tokens: int = 8192

    @property
    def path(self) -> Path:
        return Path(self.work) / f"{self.name}.json"

    def write(self) -> None:
        self.path.write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Outcome:
    """What the ranks of one job measured."""

    ranks: list[dict[str, Any]]

    def peak(self, phase: str, memory: str) -> int:
        """The most that a rank needed."""
        return max(int(rank["peaks"][phase][memory]) for rank in self.ranks)

    def part_bytes(self) -> int:
        return max(int(rank["part_bytes"]) for rank in self.ranks)

    def layer_bytes(self) -> int:
        return int(self.ranks[0]["layer_bytes"])

    def share_of_bound(self, phase: str, memory: str, part: str = "part_bytes") -> float:
        """The largest peak of a rank, relative to what the rank may need."""
        shares: list[float] = [
            rank["peaks"][phase][memory] / (BOUND * rank[part] + max(rank["layer_bytes"], rank[_LARGEST[phase]]))
            for rank in self.ranks
        ]
        return max(shares)


_LARGEST = {"read": "layer_bytes", "restore": "layer_bytes", "gather": "root_bytes"}
"""The embedding and the head are gathered together, and are often larger than a layer."""


_SOCKETS = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
"""Ranks that share a GPU meet over the loopback, where one socket is slow."""


def run_job(job: Job, timeout_s: float) -> Outcome | None:
    """Run a job. None if one of its ranks failed."""
    job.write()
    program = Path(__file__).with_name("rank.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"} | _SOCKETS
    ranks = [
        subprocess.Popen([sys.executable, str(program), str(job.path), str(rank)], env=environment)
        for rank in range(job.num_ranks)
    ]
    try:
        codes = [rank.wait(timeout_s) for rank in ranks]
    except subprocess.TimeoutExpired:
        codes = [-1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        return None
    return Outcome([json.loads(job.path.with_suffix(f".{rank}.json").read_text()) for rank in range(job.num_ranks)])
