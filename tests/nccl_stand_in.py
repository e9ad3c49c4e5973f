"""A stand-in for NCCL over gloo, with the interface of `NcclLibrary`, for ranks in one or many processes.

A unique id contains the address of rank 0. A communicator waits for ever for a missing rank. A broadcast runs on its
stream. It ends on the root when the bytes are in a buffer, from which they are sent later. If a peer hangs, all other
operations that need it hang until `abort`. If a connection breaks, the ranks at both of its ends see an
asynchronous error. `tests/gpu` holds the stand-in and NCCL to the same behaviour.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from cuda_stand_in import RuntimeStandIn
from penstock.errors import WeightPushFailed
from penstock.weights.cuda.libraries import UNIQUE_ID_BYTES
from penstock.weights.deadline import Deadline
from penstock_rollout.weights.receivers.gloo import InterruptibleStore, break_connections

FOR_EVER = timedelta(minutes=2)
"""Longer than the deadline of any test. Gloo's destructor may wait this long for a broadcast that nobody ended."""
POLL_S = 0.001


class NcclStandIn:
    """Stands in for a `NcclLibrary`. Counts communicators (`num_inits`) and aborts (`num_aborts`)."""

    def __init__(self, runtime: RuntimeStandIn, version: str = "2.28.9") -> None:
        self.runtime = runtime
        self.num_inits = 0
        self.init_began = threading.Event()
        self.num_aborts = 0
        self.silent_ranks: set[int] = set()
        """Ranks that take part in the start, but not in broadcasts."""
        self._version = version
        self._stores: list[Any] = []
        self._numbers = itertools.count(1)
        self._communicators: dict[int, _Communicator] = {}

    @property
    def num_communicators(self) -> int:
        """Number of communicators that were not aborted."""
        return len(self._communicators)

    def version(self) -> str:
        return self._version

    def unique_id(self) -> bytes:
        store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=FOR_EVER)
        self._stores.append(store)
        return f"127.0.0.1:{store.port}".encode().ljust(UNIQUE_ID_BYTES, b"\0")

    def begin(self, num_ranks: int, unique_id: bytes, rank: int) -> int:
        assert len(unique_id) == UNIQUE_ID_BYTES
        self.num_inits += 1
        number = next(self._numbers)
        self._communicators[number] = _Communicator(self, num_ranks, unique_id, rank)
        self.init_began.set()
        return number

    def is_idle(self, communicator: int) -> bool:
        return self._communicators[communicator].is_idle()

    def broadcast(self, communicator: int, pointer: int, num_bytes: int, root: int, stream: int) -> None:
        found = self._communicators[communicator]
        assert found.is_idle(), "NCCL refuses a call while another one is in progress"
        tensor = torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(pointer)))
        self.runtime.enqueue(stream, lambda: found.broadcast(tensor, root))

    def all_reduce(self, communicator: int, pointer: int, num_bytes: int, stream: int) -> None:
        found = self._communicators[communicator]
        assert found.is_idle(), "NCCL refuses a call while another one is in progress"
        self.runtime.enqueue(stream, found.all_reduce)

    def abort(self, communicator: int) -> None:
        self.num_aborts += 1
        self._communicators.pop(communicator).abort()

    def stop(self) -> None:
        """End the calls that a test left waiting. Gloo crashes if the interpreter exits while its threads run."""
        for communicator in self._communicators.values():
            communicator.abort()


class _Communicator:
    def __init__(self, nccl: NcclStandIn, num_ranks: int, unique_id: bytes, rank: int) -> None:
        self._nccl = nccl
        self._rank = rank
        self._aborted = threading.Event()
        self._failure = ""
        self._group: Any = None
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="send")
        """Sends what is in the root's buffer."""
        self._starting = threading.Thread(target=self._start, args=(num_ranks, unique_id), daemon=True)
        self._starting.start()

    def is_idle(self) -> bool:
        if self._failure:
            raise WeightPushFailed(f"NCCL failed: {self._failure}")
        return not self._starting.is_alive()

    def abort(self) -> None:
        self._aborted.set()
        self._starting.join()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Run on the stream."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        if self._rank == root:
            buffer = tensor.clone()
            self._sending.submit(self._run, self._group.broadcast, [buffer], options)
        else:
            self._run(self._group.broadcast, [tensor], options)

    def all_reduce(self) -> None:
        """Run on the stream, after everything in the root's buffer. Gloo's barrier waits for all ranks to begin it."""
        self._sending.submit(self._run, self._group.barrier).result()

    def _run(self, operation: Callable[..., Any], *arguments: Any) -> None:
        """Run an operation of gloo. A GPU's kernel would spin here too."""
        if self._rank in self._nccl.silent_ranks:
            self._aborted.wait()
        if self._aborted.is_set():
            return
        try:
            self._wait_for(operation(*arguments))
        except RuntimeError:
            self._fail()

    def _wait_for(self, work: Any) -> None:
        """Wait for gloo, or for the abort."""
        while not work.is_completed():
            if self._aborted.wait(POLL_S):
                break_connections(self._group, [work])
                return
        work.wait()

    def _start(self, num_ranks: int, unique_id: bytes) -> None:
        try:
            host, _, port = unique_id.rstrip(b"\0").decode().partition(":")
            inner = TCPStore(host, int(port), None, is_master=False, timeout=timedelta(seconds=10))
            deadline = Deadline(FOR_EVER.total_seconds(), "the start of a communicator", self._aborted)
            store = InterruptibleStore(PrefixStore("nccl", inner), deadline)
            self._group = ProcessGroupGloo(store, self._rank, num_ranks, FOR_EVER)
        except Exception:
            self._failure = "unhandled system error"

    def _fail(self) -> None:
        """Show an asynchronous error, and hang until the abort."""
        self._failure = "remote process exited or there was a network error"
        self._aborted.wait()
