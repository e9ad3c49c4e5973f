"""A member of the weight group in a separate process, with the real gRPC service and stage, but without a model.

The member writes a file with one JSON object per line: its port, then each version that it loads, with the digest of
the loaded bytes. push_faults.py lists the faults that it can have.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from nccl_binding import NcclBinding
from penstock.config.loading import load_config
from penstock.config.run import RunConfig
from penstock.v1 import weights_pb2_grpc
from penstock.weights.cluster_key import ClusterKey
from penstock.weights.cuda import libraries
from penstock.weights.transports import host_id
from penstock_learner.weights.push import PushTarget
from penstock_rollout.fleet.internal_listener import make_listener
from penstock_rollout.fleet.membership import available_transports
from penstock_rollout.fleet.weight_member import WeightMember
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.weights.reception import device_uuid
from push_faults import Fault, Say, inject
from staging_engine import ForkedWorker, LocalWorker, StagingEngine, Worker

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


async def _serve(
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
    say(port=fault.grpc_port, devices=devices, nccl_version=libraries.nccl_version())
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

        asyncio.run(_serve(config, options, binding, forked, output, say))


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

    def wait_for(self, field: str, timeout_s: float = 60.0) -> Any:
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


def fork_context() -> Any:
    """The fork server of members and publishers."""
    context = multiprocessing.get_context("forkserver")
    here = str(Path(__file__).parent)
    if here not in os.environ.get("PYTHONPATH", ""):  # Python 3.11's fork server does not get sys.path
        os.environ["PYTHONPATH"] = f"{here}:{os.environ.get('PYTHONPATH', '')}"
    context.set_forkserver_preload(["member_process", "publisher_process"])
    return context
