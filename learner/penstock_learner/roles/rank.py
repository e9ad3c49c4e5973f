"""The base of all role workers: a rank joins its role's process group and binds its device."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not listed
from torch.profiler import ProfilerActivity, profile

from penstock.config.run import RunConfig
from penstock.errors import Fenced
from penstock.logs import setup_logging
from penstock.machine import freeze_loaded_objects, keep_compiled_code, keep_files_private
from penstock_learner.crash_points import crash_point
from penstock_learner.model.architectures import prefix_sharing_roles, require_parallel
from penstock_learner.model.attention.sequence_parallel import SequenceParallel, make_sequence_parallel
from penstock_learner.model.torch_settings import DTYPES, set_up_torch
from penstock_learner.rendezvous import open_store
from penstock_learner.roles.dispatch import Join, declarations

if TYPE_CHECKING:
    from penstock_learner.model.loading import FolderModel

logger = logging.getLogger(__name__)
ORPHAN_S = 300.0
"""How long the ranks of a joined cluster wait for a new controller after theirs has died."""
SUCCESSOR_S = 20.0
"""The same after theirs was told to stop. Its pod may be replaced, but more often the run ends."""
COMPUTES = ("log_probs", "reference_log_probs", "values", "update")
"""Calls that run forward passes, backward passes and the optimizer. Each returns when the device has finished."""


class NsightCapture:
    """nsys records the calls of this rank, as named ranges, and their kernels between `start` and `stop`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        self.mark(self.step)

    def mark(self, step: int) -> None:
        torch.cuda.nvtx.mark(f"step {step}")

    def stop(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()

    def range(self, name: str) -> AbstractContextManager[None]:
        return torch.cuda.nvtx.range(name)


class Rank:
    """Base of the role workers. Ranks never read the queue: the controller sends each rank its part of a batch."""

    role = "rank"
    """Name of the role. A role of the user's own gets it from the config."""

    def __init__(self, config: RunConfig, rank: int, world_size: int, owner: str = "", name: str = "") -> None:
        self.config = config
        if name:
            self.role = name
        learner = config.learner
        self.settings: Any = learner.roles.get(self.role) or getattr(learner, self.role, None)
        """The role's own part of the config."""
        self.rank = rank
        self.world_size = world_size
        self.owner = owner
        """Identifies the controller whose calls this rank accepts."""
        self.computed_s = 0.0
        """Seconds that this rank has spent in the calls of COMPUTES."""
        self.is_up = False
        self.beat_at = time.monotonic()
        self.profile: profile | NsightCapture | None = None
        if config.learner.ray_address:  # a Ray that was started elsewhere has its own mask and environment
            keep_files_private()
            keep_compiled_code(config.cache_folder)
            threading.Thread(target=self._end_when_orphaned, daemon=True).start()

    def call(self, owner: str, method: str, *arguments: Any) -> Any:
        """Make a call of the controller, to this rank or a part of it (`publisher.push`). Raises Fenced if another
        controller has adopted this rank since."""
        if owner != self.owner:
            raise Fenced(f"another learner has adopted {self.role} rank {self.rank}; stop this one")
        started, recorded = time.monotonic(), self.profile
        try:
            with recorded.range(f"{self.role}.{method}") if isinstance(recorded, NsightCapture) else nullcontext():
                return attrgetter(method)(self)(*arguments)
        finally:
            if method in COMPUTES:
                self.computed_s += time.monotonic() - started

    def mark_up(self) -> None:
        """All ranks of the role have loaded their model. From here on another controller may adopt this one."""
        freeze_loaded_objects()
        self.is_up = True

    def declarations(self) -> dict[str, Join]:
        return declarations(type(self))

    def prefix_sharing_roles(self) -> frozenset[str]:
        return prefix_sharing_roles(self.config)

    def adopt(self, owner: str, config: RunConfig) -> bool:
        """Accept the calls of another controller, and of no earlier one. False, changing nothing, if this rank has
        another config, or has not loaded its model."""
        if config != self.config or not self.is_up:
            return False
        self.owner = owner
        self.beat()
        return True

    def beat(self) -> None:
        self.beat_at = time.monotonic()

    def await_successor(self) -> None:
        """The controller ends in order. Its successor may adopt this rank within SUCCESSOR_S."""
        self.beat_at = time.monotonic() - ORPHAN_S + SUCCESSOR_S

    def _end_when_orphaned(self) -> None:
        """Free the resources of this rank's group, which ends its ranks, if no controller calls any more."""
        from ray.util import get_current_placement_group, remove_placement_group  # a benchmark's ranks need no Ray

        while time.monotonic() - self.beat_at < ORPHAN_S:
            time.sleep(1.0)
        logger.warning("no controller has adopted the %s rank in time; it ends", self.role)
        reserved = get_current_placement_group()
        if reserved is not None:
            remove_placement_group(reserved)

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
        if learner.ray_address:
            keep_gloo_on(self.node_address)
        use_gpu = self.settings.gpus_per_rank > 0
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

    def start_profile(self, step: int) -> None:
        """Begin to record, this thread with torch's profiler, or all threads with Nsight. A trace that was not finished
        is dropped."""
        if isinstance(self.profile, NsightCapture):
            self.profile.mark(step)
            return
        self._end_profile()
        is_nsight = self.config.learner.profile.tool == "nsight"
        if is_nsight and self.device.type != "cuda":
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        try:
            self.profile = NsightCapture(step) if is_nsight else profile(activities=activities)
            self.profile.start()
        except RuntimeError as error:
            self.profile = None
            logger.error("profile was not started: %s", error)

    def write_profile(self, folder: Path, step: int) -> None:
        """End the recording and write the trace. Does nothing if the rank was restarted since `start_profile`. nsys
        writes its report itself, for successive steps one: while it writes, it may miss the begin of the next."""
        if isinstance(self.profile, NsightCapture) and step + 1 in self.config.learner.profile.steps:
            return
        ended = self._end_profile()
        if not isinstance(ended, profile):
            return
        path = folder / f"step-{step}-{self.role}-{self.rank}.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            ended.export_chrome_trace(str(path))
            logger.info("wrote %s", path)
        except (OSError, RuntimeError) as error:
            logger.error("profile %s was not written: %s", path, error)

    def _end_profile(self) -> profile | NsightCapture | None:
        ended, self.profile = self.profile, None
        if ended is not None:
            ended.stop()
        return ended

    def crash_point(self) -> None:
        crash_point(f"{self.role}.{self.rank}")

    def wait_idle(self) -> None:
        """Do nothing. A call in a lane returns once the earlier call in that lane has ended."""

    @cached_property
    def parallel(self) -> SequenceParallel | None:
        """The ranks that share this one's sequences; None if it computes whole ones. The first use is collective."""
        return make_sequence_parallel(self.config.learner.sequence_parallel_of(self.role))

    def require_parallel(self, model: FolderModel) -> None:
        """Raise ConfigError if the config wants this model's ranks to share sequences, and they cannot."""
        section = "learner." if self.role == "policy" else self.path_key.removesuffix("path")
        require_parallel(model.lm.config, model.path, self.config.learner.sequence_parallel_of(self.role), section)

    @property
    def path_key(self) -> str:
        """The config key of the role's model folder, for error messages."""
        own = "roles." if self.role in self.config.learner.roles else ""
        return f"learner.{own}{self.role}.path"

    @property
    def node_address(self) -> str:
        from ray.util import get_node_ip_address

        address: str = get_node_ip_address()
        return address

    @property
    def model_dtype(self) -> torch.dtype:
        return DTYPES[self.config.model.dtype]


def keep_gloo_on(address: str) -> None:
    """Make gloo listen on the interface with this address, unless the environment says otherwise. By default it takes
    the address of the machine's name, which no other machine reaches where it is 127.0.1.1, as on Debian."""
    for interface, found in psutil.net_if_addrs().items():
        if address in {each.address for each in found}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
