"""A weight publisher in a separate process, which a test can have killed in the middle of a push."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from member_process import fork_context
from nccl_binding import NcclBinding
from penstock.config.loading import load_config
from penstock.weights.cuda.nccl_group import NcclGroup
from penstock.weights.deadline import Deadline
from penstock_learner.weights.publisher import WeightPublisher
from penstock_learner.weights.push import PushTarget
from push_faults import Fault, inject
from staging_engine import digest_of

CALL_TIMEOUT_S = 100.0
"""Longer than every deadline in a push together. A call that takes longer hangs."""


@dataclass(frozen=True)
class Pushed:
    """The outcome of a push."""

    digest: str
    """Digest of the bytes, computed by the test."""
    committed: list[str]
    failed: dict[str, str]
    num_bytes: int
    seconds: float
    num_groups: int
    """NCCL groups that the publisher has opened since its start."""


@dataclass(frozen=True)
class Shapes:
    """The weights of a test: tensors of one size, one to a bucket."""

    num_tensors: int = 16
    num_items: int = 1024

    @property
    def named(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(f"layer.{index}", (self.num_items // 64, 64)) for index in range(self.num_tensors)]


class Publisher:
    """Lives in the process. `push` stages random weights and pushes them."""

    def __init__(self, config_file: Path, binding: NcclBinding, fault: str, shapes: Shapes, term: int) -> None:
        self.stand_in = binding.install()
        inject(Fault(fault, lambda **fields: None))
        self.device = binding.device
        self.publisher = WeightPublisher(load_config(config_file), "127.0.0.1", self.device)
        self.shapes = shapes
        self.term = term
        self.num_groups = 0
        self._count_groups()

    def push(self, version: int, targets: list[PushTarget], changed: float = 1.0, base: int | None = None) -> Pushed:
        """Push a version of which this part differs from every other version."""
        return self._push(version, self._stage(version, changed), targets, base, "push")

    def push_beside(self, version: int, late: list[PushTarget], targets: list[PushTarget]) -> list[Pushed]:
        """Push `version - 1` to late members in a lane of their own, and at the same time `version` to the others."""
        outcomes: list[Pushed] = []
        digests = [self._stage(version - 1), self._stage(version)]

        def catch_up() -> None:
            outcomes.append(self._push(version - 1, digests[0], late, None, "catch_up"))

        thread = threading.Thread(target=catch_up)
        thread.start()
        pushed = self._push(version, digests[1], targets, None, "push")
        thread.join(CALL_TIMEOUT_S)
        return [*outcomes, pushed]

    def push_adapter(self, version: int, targets: list[PushTarget], scale: float) -> Pushed:
        """Push an adapter of whole numbers, so that the merged weights are exact on every device."""
        adapter = make_adapter(version, self.shapes)
        shapes = [(name, tuple(weight.shape)) for name, weight in adapter.items()]
        staged = self.publisher.begin(version, self.term, shapes, adapter_scale=scale)
        for name, weight in adapter.items():
            staged.put(name, weight.to(self.device))
        staged.checksums(Deadline(60, "hashing"))
        return self._push(version, digest_of(staged.memory.buckets), targets, None, "push")

    def used(self) -> dict[str, int]:
        """What must not grow from push to push: bytes of GPU memory, and communicators and threads of a stand-in."""
        if self.stand_in is None:
            free, total = torch.cuda.mem_get_info()
            return {"bytes": total - free}
        num_bytes = sum(len(memory) for memory in self.stand_in.runtime.allocations.values())
        return {"bytes": num_bytes, "communicators": self.stand_in.num_communicators}

    def _stage(self, version: int, changed: float = 1.0) -> str:
        """Stage a version. Returns the digest of its bytes."""
        keep = [known for known in self.publisher.staged if known >= version - 1]
        staged = self.publisher.begin(version, self.term, self.shapes.named, keep=keep)
        common, own = (torch.Generator(self.device).manual_seed(seed) for seed in (0, version))
        for name, shape in self.shapes.named:
            weight = torch.rand(shape, generator=common, device=self.device)
            other = torch.rand(shape, generator=own, device=self.device)
            mask = torch.rand(shape, generator=own, device=self.device) < changed
            staged.put(name, torch.where(mask, other, weight))
        staged.checksums(Deadline(60, "hashing"))
        return digest_of(staged.memory.buckets)

    def _push(self, version: int, digest: str, targets: list[PushTarget], base: int | None, lane: str) -> Pushed:
        started = time.monotonic()
        report = self.publisher.push(version, targets, base_version=base, lane=lane)
        seconds = time.monotonic() - started
        return Pushed(digest, report.committed, report.failed, report.num_bytes, seconds, self.num_groups)

    def _count_groups(self) -> None:
        start = NcclGroup.open

        def counted(group: NcclGroup, deadline: Deadline) -> None:
            self.num_groups += 1
            start(group, deadline)

        NcclGroup.open = counted  # type: ignore[method-assign]


def make_adapter(version: int, shapes: Shapes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    adapter = {}
    for name, (num_rows, num_columns) in shapes.named:
        adapter[f"{name}.lora_A"] = torch.randint(-3, 4, (4, num_columns), generator=generator).float()
        adapter[f"{name}.lora_B"] = torch.randint(-3, 4, (num_rows, 4), generator=generator).float()
    return adapter


@dataclass
class PublisherProcess:
    """A running publisher, for the test to control."""

    process: Any
    pipe: Connection

    @classmethod
    def start(
        cls, config_file: Path, binding: NcclBinding, shapes: Shapes, *, fault: str = "", term: int = 1
    ) -> PublisherProcess:
        context = fork_context()
        ours, theirs = context.Pipe()
        arguments = (theirs, config_file, binding, fault, shapes, term)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the Publisher. A call that hangs, or an exception there, fails the test."""
        self.ask(method, *arguments)
        assert self.pipe.poll(CALL_TIMEOUT_S), f"{method} hangs"
        answer, failure = self.pipe.recv()
        assert not failure, failure
        return answer

    def ask(self, method: str, *arguments: Any) -> None:
        """Begin a call whose publisher is killed before it ends."""
        self.pipe.send((method, arguments))

    def wait_for_death(self) -> None:
        self.process.join(CALL_TIMEOUT_S)
        assert not self.process.is_alive(), "the publisher's fault did not happen"

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)


def _serve(pipe: Connection, config_file: Path, binding: NcclBinding, fault: str, shapes: Shapes, term: int) -> None:
    publisher = Publisher(config_file, binding, fault, shapes, term)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(publisher, method)(*arguments), ""))
        except Exception as error:
            pipe.send((None, repr(error)))
