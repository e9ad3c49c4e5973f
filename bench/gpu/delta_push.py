"""Compares delta pushes with pushes of all bytes, after one real optimizer step of a 7B model (lr 1e-6, bfloat16).

    PYTHONPATH=.:rollout_server:learner:bench python bench/gpu/delta_push.py

A push is timed from weights in training memory to a version that the member has received, verified and loaded. Staging
and sending overlap as they do in a run. Whole pushes and delta pushes alternate. After each push the weights that the
member would serve are compared with the learner's. The two processes share one GPU, so the network of nccl and gloo
is loopback.

It needs torch, CuPy, transformers, pydantic and grpcio, takes about 3 minutes, and prints as it goes. `--shape tiny
--transports gloo` runs on a CPU.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from delta_push_parts.model import MemberProcess, free, shares_of_steps, tensor_checksums, versions_of_a_step
from harness import Child, Results, be_a_host_of_its_own, make_parser, run_parts, save, say, sized
from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock_learner.weights.publisher import DELTA_TRANSPORTS, DeltaChoice, WeightPublisher
from penstock_learner.weights.senders import PushTarget
from weights_gpu_parts.engine import HOST, RUN

NAME = "delta_push"
TIMEOUT_S = 200.0
NUM_STEPS = sized(5, 1)
NUM_ROUNDS = sized(4, 2)
TRANSPORT_S = 25.0
"""No new round begins after so many seconds, once there are MIN_ROUNDS."""
MIN_ROUNDS = 2
MAX_BYTES = 0.1
"""Goal of the bytes of a delta, as a share of the bytes of a whole push."""


def config_of(folder: Path, transport: str) -> RunConfig:
    weights = {"transport": transport, "delta": True, "push_timeout_s": 60.0}
    model = {"path": str(folder), "dtype": "bfloat16"}
    return validate({"run": RUN, "run_dir": str(folder), "model": model, "weights": weights}, "bench")


class Learner:
    """The learner's process: the weights before and after a step, and a publisher."""

    def __init__(self, device_type: str) -> None:
        be_a_host_of_its_own()
        self._device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
        self._versions: list[list[tuple[str, torch.Tensor]]] = []
        self._publisher: WeightPublisher | None = None
        self._version = 0

    def shares(self, shape: str, num_steps: int) -> list[float]:
        return shares_of_steps(shape, self._device, num_steps)

    def make_versions(self, shape: str) -> tuple[float, float]:
        """Make one step. Returns the share of weights that it changed, and the gigabytes of a version."""
        self._versions, share = versions_of_a_step(shape, self._device)
        return share, sum(tensor.nbytes for _, tensor in self._versions[0]) / 1e9

    def checksums(self) -> dict[str, str]:
        """The checksum of every weight of the version that was pushed last."""
        return tensor_checksums(dict(self._pushed))

    @property
    def _pushed(self) -> list[tuple[str, torch.Tensor]]:
        return self._versions[self._version % 2]

    def open(self, config: RunConfig) -> None:
        self._publisher, self._version = WeightPublisher(config, HOST, self._device), 0

    def close(self) -> None:
        self._publisher = None
        free(self._device)

    def push(self, target: dict[str, Any], is_delta: bool) -> dict[str, Any]:
        publisher = self._publisher
        assert publisher is not None
        self._version += 1
        base = self._version - 1 if is_delta else None
        started = time.monotonic()
        staging = threading.Thread(target=self._stage, args=(publisher,))
        staging.start()
        report = publisher.push(self._version, [PushTarget(**target)], base_version=base)
        total_s = time.monotonic() - started
        staging.join()
        return {"total_s": total_s, "num_bytes": report.num_bytes, "failed": report.failed} | report.seconds

    def _stage(self, publisher: WeightPublisher) -> None:
        """Copy every weight to its bucket, as the training thread does."""
        shapes = [(name, tuple(tensor.shape)) for name, tensor in self._pushed]
        staged = publisher.begin(self._version, 1, shapes, keep=[self._version - 1])
        for name, tensor in self._pushed:
            staged.put(name, tensor)


def bench(shape: str, transports: list[str], num_steps: int) -> Results:
    results = Results()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    learner = Child(Learner, device_type)
    folder = tempfile.TemporaryDirectory(prefix="penstock-bench-")
    configs = [config_of(Path(folder.name) / transport, transport) for transport in transports]
    members = [Child(MemberProcess, config, device_type) for config in configs]  # they start while the learner steps
    try:
        shares = learner.call("shares", shape, num_steps)
        results.add("weights changed by each of the first steps", "%", *(100 * share for share in shares))
        say(", ".join(f"{100 * share:.2f} %" for share in shares))
        share, gigabytes = learner.call("make_versions", shape)
        results.add("weights changed by the step that is pushed", "%", 100 * share)
        results.add("weights", "GB", gigabytes)
        save(results)
        for config, member in zip(configs, members, strict=True):
            _bench_transport(results, learner, member, config)
            save(results)
    finally:
        for child in (learner, *members):
            child.stop()
        folder.cleanup()
    return results


def _bench_transport(results: Results, learner: Child, member: Child, config: RunConfig) -> None:
    transport = config.weights.transport
    pushes: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    num_pushed = num_exact = 0
    try:
        target = member.call("target")
        learner.call("open", config)
        started = time.monotonic()
        for round_index in range(1 + NUM_ROUNDS):
            if len(pushes[True]) >= MIN_ROUNDS and time.monotonic() - started > TRANSPORT_S:
                break
            for is_delta in (False, True):
                push = learner.call("push", target, is_delta)
                assert not push["failed"], push["failed"]
                is_exact = learner.call("checksums") == member.call("checksums")
                num_pushed, num_exact = num_pushed + 1, num_exact + is_exact
                if round_index > 0:  # the first round makes the connections and takes memory
                    pushes[is_delta].append(push)
                phases = {name: round(value, 3) for name, value in push.items() if name not in ("num_bytes", "failed")}
                say(f"{transport}: {'delta' if is_delta else 'whole'}, {push['num_bytes'] / 1e9:.3f} GB, {phases}")
    finally:
        learner.call("close")
        member.stop()
    results.bar(f"{transport}: pushes after which every weight is bit for bit the learner's", num_exact / num_pushed, 1)
    _judge(results, transport, pushes[False], pushes[True])


def _judge(results: Results, transport: str, whole: list[dict[str, Any]], delta: list[dict[str, Any]]) -> None:
    for kind, pushes in (("whole", whole), ("delta", delta)):
        results.add(f"{transport}: {kind}, bytes", "GB", *(push["num_bytes"] / 1e9 for push in pushes))
        for phase, name in (("total_s", "push"), ("encode", "encode"), ("receive", "receive"), ("pause", "pause")):
            values = [push[phase] for push in pushes if phase in push]
            if values:
                results.add(f"{transport}: {kind}, {name}", "ms", *(1e3 * value for value in values))
    byte_share = delta[0]["num_bytes"] / whole[0]["num_bytes"]
    second_shares = [mine["total_s"] / all_bytes["total_s"] for mine, all_bytes in zip(delta, whole, strict=True)]
    pause_share = statistics.median(d["pause"] for d in delta) / statistics.median(w["pause"] for w in whole)
    results.bar(f"{transport}: bytes, delta / whole", byte_share, MAX_BYTES, at_most=True)
    results.add(f"{transport}: pause, delta / whole", "ratio", pause_share)
    results.add(f"{transport}: seconds, delta / whole", "ratio", *second_shares)
    if transport in DELTA_TRANSPORTS:
        is_delta = auto_takes_delta(transport, delta, whole)
        results.add(f"{transport}: `auto` sends deltas", "yes = 1", float(is_delta))
        chosen = statistics.median(second_shares) if is_delta else 1.0
        results.bar(f"{transport}: seconds, as `auto` chooses / whole", chosen, 1, at_most=True)


def auto_takes_delta(transport: str, delta: list[dict[str, Any]], whole: list[dict[str, Any]]) -> bool:
    """Whether `weights.delta: auto` would send deltas after these pushes."""
    choice = DeltaChoice()
    choice.record(transport, ["member"], 0.0, tried_delta=False)
    for mine, all_bytes in zip(delta, whole, strict=True):
        choice.record(transport, ["member"], mine["total_s"], tried_delta=True)
        choice.record(transport, ["member"], all_bytes["total_s"], tried_delta=False)
    return choice.takes_delta(transport, ["member"])


def main() -> int:
    parser = make_parser()
    parser.add_argument("--shape", default=sized("7b", "tiny"), choices=["7b", "0.5b", "tiny"])
    parser.add_argument("--transports", default=sized("nccl,cuda_ipc,gloo", "gloo"))
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="steps whose share of changed weights is measured")
    arguments = parser.parse_args()

    def run(_: str) -> Results:
        return bench(arguments.shape, arguments.transports.split(","), arguments.steps)

    shape = arguments.shape
    return 0 if run_parts(NAME, "delta pushes on one GPU", [shape], {shape: TIMEOUT_S}, run) else 1


if __name__ == "__main__":
    sys.exit(main())
