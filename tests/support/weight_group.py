"""A member of the weight group and a weight publisher, each in a separate process and without a model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from penstock.config.loading import load_config
from penstock.config.run import RunConfig
from penstock.internal_calls import ClusterKey
from penstock.v1 import weights_pb2_grpc
from penstock.weights import cuda
from penstock.weights.cuda import NcclGroup
from penstock.weights.transports import XXH3_PIECES, Deadline, host_checksum, host_id, weights_digest
from penstock_learner.weights.publisher import WeightPublisher
from penstock_learner.weights.senders import PushTarget
from penstock_rollout.fleet.membership import WeightMember, available_transports, make_listener
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.weights.stage import device_uuid
from support.cuda_stand_ins import NcclBinding
from support.forked_process import fork_context
from support.staging_engine import Fault, ForkedWorker, LocalWorker, Say, StagingEngine, Worker, digest_of, inject


def stage_weights(
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    publisher: WeightPublisher,
    version: int,
    keep: tuple[int, ...] = (),
    changed: float = 1.0,
) -> str:
    """Stage random weights. A part of them differs from version to version. Returns the digest of the bytes."""
    base, own = np.random.default_rng(0), np.random.default_rng(version)
    staged = publisher.begin(version, 1, shapes, keep=keep)
    for name, shape in shapes:
        weight = base.standard_normal(shape, dtype=np.float32)
        mask = own.random(shape) < changed
        weight[mask] = own.standard_normal(shape, dtype=np.float32)[mask]
        staged.put(name, torch.from_numpy(weight))
    staged.checksums(Deadline(60, "hashing"))
    return weights_digest([host_checksum(XXH3_PIECES, bucket.numpy()) for bucket in staged.memory.buckets])


TERM_FILE = "term"
"""A file beside a member's output with the current term. Without it, the term is 1."""


@dataclass(frozen=True)
class MemberOptions:
    """How a member differs from a healthy one with one worker."""

    num_workers: int = 1
    fault: str = ""
    is_quiet: bool = False
    """Do not report what is loaded."""
    binding: NcclBinding | None = None
    """None: the stand-in if the config says `nccl`."""


async def _serve_member(
    config: RunConfig, options: MemberOptions, binding: NcclBinding, forked: list[Worker], output: Path, say: Say
) -> None:
    if options.binding is not None or config.weights.transport == "nccl":
        binding.install()
    fault = Fault(options.fault, say)
    inject(fault)
    workers: list[Worker] = [LocalWorker(0, config.model.path, binding.device), *forked]
    devices = (device_uuid(binding.device),) * options.num_workers
    engine = StagingEngine(workers, devices, fault, None if options.is_quiet else say)

    async def read_term() -> int:
        file = output.parent / TERM_FILE
        return int(file.read_text()) if file.exists() else 1

    member = WeightMember(config.run, engine, RolloutMetrics(CollectorRegistry()), read_term=read_term)
    key = ClusterKey.of(config)
    key.make_if_missing()
    listener = make_listener(key)
    weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(member, listener)
    fault.grpc_port = listener.add_insecure_port("127.0.0.1:0")
    await listener.start()
    say(port=fault.grpc_port, devices=devices, nccl_version=cuda.nccl_version())
    await listener.wait_for_termination()


def run(config_file: Path, options: MemberOptions, output: Path) -> None:
    """Run a member. This is the main function of the process."""
    config = load_config(config_file)
    binding = options.binding or NcclBinding()
    # Workers are forked first: a process with threads or CUDA must not fork.
    forked: list[Worker] = [ForkedWorker(index, config.model.path, binding) for index in range(1, options.num_workers)]
    with output.open("w", buffering=1) as file:

        def say(**fields: object) -> None:
            file.write(json.dumps(fields) + "\n")

        asyncio.run(_serve_member(config, options, binding, forked, output, say))


@dataclass
class MemberProcess:
    """A running member, for the test to control."""

    process: Any
    output: Path

    @classmethod
    def launch(cls, config_file: Path, output: Path, options: MemberOptions) -> MemberProcess:
        """Fork a member from a fork server that has imported everything. It may not be ready yet."""
        process = fork_context().Process(target=run, args=(config_file, options, output), daemon=True)
        process.start()
        return cls(process, output)

    @classmethod
    def start(
        cls, config_file: Path, output: Path, num_workers: int = 1, fault: str = "", *, is_quiet: bool = False
    ) -> MemberProcess:
        """Launch a member and wait until it is ready."""
        member = cls.launch(config_file, output, MemberOptions(num_workers, fault, is_quiet))
        member.wait_for("port")
        return member

    @property
    def server_id(self) -> str:
        return f"member-{self.process.pid}"

    @property
    def target(self) -> PushTarget:
        address = f"127.0.0.1:{self.wait_for('port')}"
        devices = tuple(self.wait_for("devices"))
        transports = ("nccl", *(name for name in available_transports(devices) if name != "nccl"))
        return PushTarget(self.server_id, address, devices, host_id(), transports, self.wait_for("nccl_version"))

    @property
    def loads(self) -> list[tuple[int, list[str]]]:
        """The versions that it loaded, in order, each with the digests of its workers' bytes."""
        return [(line["version"], line["digests"]) for line in self._lines() if "version" in line]

    @property
    def loaded_tensors(self) -> list[str]:
        """The digests of the tensors that its workers would have loaded last."""
        return [line["tensors"] for line in self._lines() if "version" in line][-1]

    @property
    def has_hung(self) -> bool:
        """Whether its fault has happened."""
        return any("fault" in line for line in self._lines())

    @property
    def is_alive(self) -> bool:
        return bool(self.process.is_alive())

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process after a SIGSTOP."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def wait_for(self, field: str, timeout_s: float = 120.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in self._lines():
                if field in line:
                    return line[field]
            assert self.is_alive or self.has_hung, f"the member ended before it said its {field}: {self._lines()}"
            time.sleep(0.02)
        raise AssertionError(f"the member did not say its {field} within {timeout_s} s: {self._lines()}")

    def _lines(self) -> list[dict[str, Any]]:
        if not self.output.exists():
            return []
        return [json.loads(line) for line in self.output.read_text().splitlines() if line.endswith("}")]


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

    def push_concurrently(self, version: int, late: list[PushTarget], targets: list[PushTarget]) -> list[Pushed]:
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

        def counted(group: NcclGroup, deadline: Deadline, meet: Callable[[], bytes]) -> None:
            self.num_groups += 1
            start(group, deadline, meet)

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
        process = context.Process(target=_serve_publisher, args=arguments, daemon=True)
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


def _serve_publisher(
    pipe: Connection, config_file: Path, binding: NcclBinding, fault: str, shapes: Shapes, term: int
) -> None:
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
