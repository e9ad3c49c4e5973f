"""Choose what `nccl` means in a test process: NCCL on a GPU, or its stand-in in host memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from cuda_stand_in import RuntimeStandIn
from nccl_stand_in import NcclStandIn
from penstock.weights.cuda import libraries
from penstock_learner.weights.senders import nccl as sending
from penstock_rollout.weights import stage as stage_module
from penstock_rollout.weights.receivers import nccl as receiving


@dataclass(frozen=True)
class NcclBinding:
    """The binding of one process. `install` it before anything else there."""

    is_real: bool = False
    in_place: bool = False
    """Broadcast buckets where they are, as between GPUs. Otherwise both ends stage in host memory."""
    version: str = ""
    """The version of NCCL to report instead of the true one."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.is_real else torch.device("cpu")

    def install(self) -> NcclStandIn | None:
        """Replace NCCL by the stand-in, or let this process be a rank beside others on the same GPU."""
        stand_in = None
        if self.is_real:
            # NCCL refuses two ranks on one GPU of one host. So each process says that it is a host of its own.
            os.environ["NCCL_HOSTID"] = f"pid-{os.getpid()}"
            os.environ["NCCL_SOCKET_IFNAME"] = "lo"
            os.environ["NCCL_IB_DISABLE"] = "1"
            libraries.runtime()  # imports CuPy, which takes seconds, before a deadline runs
            if not self.in_place:
                stage_module.SPARE_DEVICE_BYTES = 2**60
        else:
            stand_in = install_nccl_stand_in()
            if self.in_place:
                sending.is_on_gpu = lambda wire: True
                receiving.is_gpu = lambda device: True
        if self.version:
            libraries.nccl_version = lambda: self.version
        return stand_in


def install_nccl_stand_in() -> NcclStandIn:
    """Replace NCCL in this process by gloo, with pointers to host memory."""
    runtime = RuntimeStandIn()
    nccl = NcclStandIn(runtime)
    libraries.runtime = lambda: runtime
    libraries.nccl = lambda: nccl
    return nccl
