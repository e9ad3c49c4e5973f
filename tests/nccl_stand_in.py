"""A stand-in for `cupy.cuda.nccl` over gloo, with the same signatures and results, for ranks in one or many processes.

It behaves like CuPy 14. A unique id is 128 bytes that contain the address of rank 0. A communicator waits for ever for
a missing rank. With `blocking = 0` a call in progress raises KeyError(7), because CuPy's table lacks this result. A
broadcast runs on its stream. If a peer hangs, the broadcast hangs until `abort`.
"""

from __future__ import annotations

import ctypes
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from cuda_stand_in import RuntimeStandIn
from penstock.weights.deadline import Deadline
from penstock_rollout.weights.receivers.gloo import InterruptibleStore, break_connections

IN_PROGRESS = 7
NAMES = {1: "UNHANDLED_CUDA_ERROR", 2: "SYSTEM_ERROR", 3: "INTERNAL_ERROR", 4: "INVALID_ARGUMENT", 6: "REMOTE_ERROR"}
FOR_EVER = timedelta(minutes=2)
"""Longer than the deadline of any test. Gloo's destructor may wait this long for a broadcast that nobody ended."""
POLL_S = 0.001


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"NCCL_ERROR_{NAMES[status]}: stand-in")


class NcclConfig:
    def __init__(self, split_share: int = 0) -> None:
        self.split_share = split_share
        self.blocking = 1


class NcclStandIn:
    """Stands in for the module `cupy.cuda.nccl`. Counts communicators (`num_inits`) and aborts (`num_aborts`)."""

    available = True
    NCCL_UINT8 = 1
    NcclError = NcclError
    NcclConfig = NcclConfig

    def __init__(self, runtime: RuntimeStandIn) -> None:
        self.runtime = runtime
        self.num_inits = 0
        self.init_began = threading.Event()
        self.num_aborts = 0
        self.silent_ranks: set[int] = set()
        """Ranks that take part in the start, but not in broadcasts."""
        self.broken_ranks: set[int] = set()
        """Ranks that see an asynchronous error at the next broadcast."""
        self.communicators: list[_Communicator] = []
        self._stores: list[Any] = []
        module = self

        class NcclCommunicator(_Communicator):
            nccl = module

        self.NcclCommunicator = NcclCommunicator

    def get_unique_id(self) -> bytes:
        store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=FOR_EVER)
        self._stores.append(store)
        return f"127.0.0.1:{store.port}".encode().ljust(128, b"\0")

    def stop(self) -> None:
        """End the calls that a test left waiting. Gloo crashes if the interpreter exits while its threads run."""
        for communicator in self.communicators:
            communicator.abort()


class _Communicator:
    nccl: NcclStandIn

    def __init__(self, ndev: int, commId: bytes, rank: int, config: NcclConfig | None = None) -> None:  # noqa: N803
        assert len(commId) == 128
        self.nccl.num_inits += 1
        self.nccl.init_began.set()
        self.nccl.communicators.append(self)
        self.rank = rank
        self._aborted = threading.Event()
        self._failure = 0
        self._group: Any = None
        self._starting = threading.Thread(target=self._start, args=(ndev, commId), daemon=True)
        self._starting.start()
        if config is not None and config.blocking == 0:
            raise KeyError(IN_PROGRESS)
        self._starting.join()
        self.check_async_error()

    def _start(self, num_ranks: int, unique_id: bytes) -> None:
        try:
            host, _, port = unique_id.rstrip(b"\0").decode().partition(":")
            inner = TCPStore(host, int(port), None, is_master=False, timeout=timedelta(seconds=10))
            deadline = Deadline(FOR_EVER.total_seconds(), "the start of a communicator", self._aborted)
            store = InterruptibleStore(PrefixStore("nccl", inner), deadline)
            self._group = ProcessGroupGloo(store, self.rank, num_ranks, FOR_EVER)
        except Exception:
            self._failure = 2

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        assert datatype == self.nccl.NCCL_UINT8
        self.check_async_error()
        array = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(buff))
        self.nccl.runtime.enqueue(stream, lambda: self._broadcast(torch.from_numpy(array), root))

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Run on the stream. A GPU's kernel would spin here too."""
        if self.rank in self.nccl.silent_ranks:
            self._aborted.wait()
        if self.rank in self.nccl.broken_ranks:
            self._failure = 6
            self._aborted.wait()
        if self._aborted.is_set():
            return
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        work = self._group.broadcast([tensor], options)
        while not work.is_completed():
            if self._aborted.wait(POLL_S):
                break_connections(self._group, [work])
                return
        try:
            work.wait()
        except RuntimeError:
            self._failure = 6
            self._aborted.wait()

    def check_async_error(self) -> None:
        if self._failure:
            raise NcclError(self._failure)
        if self._starting.is_alive():
            raise KeyError(IN_PROGRESS)

    def abort(self) -> None:
        self.nccl.num_aborts += 1
        self._aborted.set()
        self._starting.join()

    def destroy(self) -> None:
        self._group = None
