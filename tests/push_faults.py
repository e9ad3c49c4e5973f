"""Faults of a process at a chosen phase of a weight push.

A fault is `KIND@PHASE`, or `KIND@PHASE#N` for the Nth time that the phase is reached:

| kind       | what happens                                                                    |
|------------|---------------------------------------------------------------------------------|
| die        | the process is killed                                                           |
| stop       | the process is stopped (SIGSTOP), until the test continues it                   |
| slow       | the process pauses for SLOW_S                                                   |
| disconnect | for DISCONNECTED_S, its TCP connections break, except those of its gRPC service |

Phases of a member: announce, meeting, first bucket, middle, receive, commit, load. Of a publisher: meeting, first
bucket, middle, commit. `meeting`, `first bucket` and `middle` exist with nccl only.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.weights.cuda.nccl_group import NcclGroup
from penstock.weights.deadline import Deadline
from penstock_learner.weights.member_calls import MemberCalls
from penstock_rollout.weights import stage as stage_module
from penstock_rollout.weights.reception import Arrived, Receiver, Reception, find_receiver

SLOW_S = 1.0
DISCONNECTED_S = 0.3
MEETING_S = 0.01
"""Time between the begin of a meeting and its fault."""
NUM_BEFORE_MIDDLE = 8
"""Number of waits for a broadcast that end before the middle of a push."""

Say = Callable[..., None]


class Fault:
    """Happens once, when its phase is reached."""

    def __init__(self, text: str, say: Say) -> None:
        self.kind, _, phase = text.partition("@")
        self.phase, _, number = phase.partition("#")
        self._num_left = int(number or 1)
        self.say = say
        self.grpc_port = 0

    def at(self, phase: str) -> None:
        if phase != self.phase:
            return
        self._num_left -= 1
        if self._num_left:
            return
        self.phase = ""
        self.say(fault=self.kind, at=phase)
        if self.kind == "slow":
            time.sleep(SLOW_S)
        elif self.kind == "disconnect":
            ends_at = time.monotonic() + DISCONNECTED_S
            while time.monotonic() < ends_at:
                disconnect(self.grpc_port)
                time.sleep(0.005)
            self.say(connected=True)
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "die" else signal.SIGSTOP)
            time.sleep(0.2)  # until the signal takes effect


def disconnect(spared_port: int) -> None:
    """Shut down every TCP connection of this process whose local port is not the spared one."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
                is_listening = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_tcp and not is_listening and found.getsockname()[1] != spared_port:
                    found.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed meanwhile, or not connected


def inject(fault: Fault) -> None:
    """Make the fault happen in this process, at the phases of a transfer and at a publisher's commit."""
    _inject_into_receivers(fault)
    _inject_into_groups(fault)
    commit = MemberCalls.commit

    def faulty_commit(self: MemberCalls, members: Any, request: Any) -> Any:
        fault.at("commit")
        return commit(self, members, request)

    MemberCalls.commit = faulty_commit  # type: ignore[method-assign]


def _inject_into_receivers(fault: Fault) -> None:
    """`receive`: the first bucket has arrived, by any transport."""

    def find(transport: str) -> Receiver:
        inner = find_receiver(transport)

        def receive(reception: Reception) -> Iterator[Arrived]:
            for arrived in inner(reception):
                yield arrived
                fault.at("receive")

        return receive

    stage_module.find_receiver = find


def _inject_into_groups(fault: Fault) -> None:
    """`meeting`: a communicator is starting. `first bucket`: it is enqueued. `middle`: half of the buckets arrived."""
    start, broadcast, wait = NcclGroup.open, NcclGroup.broadcast, NcclGroup.wait
    num_waits = 0

    def faulty_open(self: NcclGroup, deadline: Deadline) -> None:
        if fault.kind == "slow":
            fault.at("meeting")
        else:
            threading.Timer(MEETING_S, fault.at, ["meeting"]).start()
        start(self, deadline)

    def faulty_broadcast(self: NcclGroup, *arguments: Any, **named: Any) -> int:
        event = broadcast(self, *arguments, **named)
        fault.at("first bucket")
        return event

    def faulty_wait(self: NcclGroup, event: int, deadline: Deadline) -> None:
        nonlocal num_waits
        wait(self, event, deadline)
        num_waits += 1
        if num_waits == NUM_BEFORE_MIDDLE:
            fault.at("middle")

    NcclGroup.open = faulty_open  # type: ignore[method-assign]
    NcclGroup.broadcast = faulty_broadcast  # type: ignore[method-assign]
    NcclGroup.wait = faulty_wait  # type: ignore[method-assign]
