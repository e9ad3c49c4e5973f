"""The base of all role workers: a rank joins its role's process group and binds its device."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not listed

from penstock.config.run import RunConfig
from penstock.logs import setup_logging
from penstock_learner.crash_points import crash_point
from penstock_learner.model.precision import DTYPES
from penstock_learner.model.torch_settings import set_up_torch
from penstock_learner.rendezvous import open_store
from penstock_learner.roles.profiling import RankProfiler

logger = logging.getLogger(__name__)


class Rank:
    """Base of the role workers. Ranks never read the queue: the controller sends each rank its part of a batch."""

    role = "rank"

    def __init__(self, config: RunConfig, rank: int, world_size: int) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.profiler = RankProfiler(self.role, rank)

    def rendezvous(self) -> str:
        """Open the store through which the other ranks join. Called on rank 0. Returns the store's address."""
        timeout = timedelta(seconds=self.config.learner.rank_timeout_s)
        self.store = open_store(self.node_address, self.world_size, timeout)
        return f"{self.node_address}:{self.store.port}"

    def join(self, rendezvous: str) -> None:
        """Join the role's process group. It uses NCCL for tensors on a GPU and gloo for the others."""
        setup_logging(f"{self.role}[{self.rank}]", self.config.run)
        learner = self.config.learner
        set_up_torch(learner.threads_per_rank, compiles=learner.compile)
        torch.manual_seed(self.config.seed)
        use_gpu = getattr(learner, self.role).gpus_per_rank > 0
        self.device = torch.device("cuda", 0) if use_gpu else torch.device("cpu")
        timeout = timedelta(seconds=learner.rank_timeout_s)
        if self.rank != 0:
            host, _, port = rendezvous.rpartition(":")
            self.store = TCPStore(host, int(port), self.world_size, is_master=False, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_gpu else "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
        )

    def start_profile(self) -> None:
        self.profiler.start(self.device)

    def write_profile(self, folder: Path, step: int) -> None:
        self.profiler.write(folder, step)

    def crash_point(self) -> None:
        """Pass a place at which fault tests can kill this rank."""
        crash_point(f"{self.role}.{self.rank}")

    def wait_idle(self) -> None:
        """Do nothing. A call in a lane returns once the earlier call in that lane has ended."""

    @property
    def node_address(self) -> str:
        address: str = ray.util.get_node_ip_address()
        return address

    @property
    def model_dtype(self) -> torch.dtype:
        return DTYPES[self.config.model.dtype]
