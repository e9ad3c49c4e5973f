"""The records of a weight push that the controller and policy rank 0 exchange: its targets and its result."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PushTarget:
    """A rollout server that takes part in a push."""

    server_id: str
    address: str
    devices: tuple[str, ...] = ("cpu",)
    """The device of each worker's weights: `cpu`, or a GPU's UUID."""
    host_id: str = ""
    """Two processes with the same host id can map each other's memory."""
    transports: tuple[str, ...] = ("gloo", "snapshot")
    """Transports by which it can receive."""
    nccl_version: str = ""
    """Version of its NCCL library. Empty if it cannot receive by `nccl`."""


def num_ranks(members: Sequence[PushTarget]) -> int:
    """Return the number of ranks: the publisher and every worker."""
    return 1 + sum(len(member.devices) for member in members)


@dataclass
class PushReport:
    """The outcome of pushing one version to a set of servers."""

    policy_version: int
    transport: str = ""
    weights_digest: str = ""
    committed: list[str] = field(default_factory=list)
    """Servers that now serve the version."""
    failed: dict[str, str] = field(default_factory=dict)
    """Servers to evict, each with the reason."""
    superseded: list[str] = field(default_factory=list)
    """Servers that were skipped, because the push had to start again and a newer version was staged. None committed."""
    nonfinite: str = ""
    """Name of a tensor that is not finite. In this case no server has committed the version."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each phase: encode (if a delta was tried), announce, transfer and commit at the publisher; receive,
    load and pause of the slowest member."""
    num_bytes: int = 0
    """Bytes sent to each worker, times the number of workers that committed."""
    running_requests: int = 0
    """Requests, over all members, that were running while the version flipped."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to the phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started
