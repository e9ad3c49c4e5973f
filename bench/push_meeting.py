"""What the meeting of a push by gloo costs the publisher, with many workers, in one group or through relays.

    make bench-push_meeting ARGS="--workers 127 --group-sizes 4096 32"

Workers are threads of a few processes, each with the real receiver, and the publisher is this process. The version has
a few kilobytes, so nearly all time is that of the meeting. Every worker must get the exact bytes. Wall times are those
of all workers on one machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness import sized
from penstock.v1 import weights_pb2
from penstock.weights.checksums import XXH3_PIECES
from penstock.weights.deadline import Deadline
from penstock.weights.manifest import TensorShape, build_manifest
from penstock_learner.weights.push import PushTarget
from penstock_learner.weights.senders import GlooSender, Shipment
from penstock_learner.weights.staging import HostBuckets, StagedVersion
from penstock_rollout.weights.stage import WeightStage

DEADLINE_S = 600.0
NUM_ITEMS = 4096


def receive(ranks: Sequence[int], num_ranks: int, pipe: Any) -> None:
    """Receive one push after the other, as workers with these ranks. This is the main function of a process."""
    allow_files()
    pipe.send("started")
    while (announced := pipe.recv()) is not None:
        rendezvous, encoded, checksums = announced
        manifest = weights_pb2.WeightManifest.FromString(encoded)
        stages = [
            WeightStage(
                weights_pb2.AnnounceRequest(
                    manifest=manifest, transport="gloo", rendezvous=rendezvous, rank=rank, world_size=num_ranks,
                    deadline_s=DEADLINE_S,
                ),
                Path("unused"),
            )
            for rank in ranks
        ]  # fmt: skip
        started = time.process_time()
        for stage in stages:
            stage.start()
        for stage in stages:
            stage.done.result(DEADLINE_S)
        failures = [why for stage in stages if (why := stage.failure or stage.mismatch(checksums))]
        pipe.send((time.process_time() - started, failures))


def allow_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def stage_version() -> StagedVersion:
    manifest = build_manifest("run", 1, 1, [TensorShape("weight", "F32", (NUM_ITEMS,))], bucket_bytes=2**20)
    manifest.checksum = XXH3_PIECES
    staged = StagedVersion(manifest, HostBuckets([bucket.num_bytes for bucket in manifest.buckets]))
    staged.put("weight", torch.rand(NUM_ITEMS))
    return staged


def push(staged: StagedVersion, sender: GlooSender, num_workers: int, pipes: Sequence[Any]) -> str:
    """Push once. Returns the figures as a line."""
    members, shipment = (
        [PushTarget(str(number), "") for number in range(num_workers)],
        Shipment(staged.manifest, staged),
    )
    checksums = staged.checksums(Deadline(DEADLINE_S, "hashing"))
    cpu, wall = time.process_time(), time.monotonic()
    rendezvous = sender.open(shipment, members, Deadline(DEADLINE_S, "opening"))
    for pipe in pipes:
        pipe.send((rendezvous, staged.manifest.SerializeToString(), checksums))
    sender.send(shipment, members, Deadline(DEADLINE_S, "sending"))
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    answers = [pipe.recv() for pipe in pipes]
    sender.close(failed=False)
    failures = [why for _, failed in answers for why in failed]
    if failures:
        raise SystemExit(f"{len(failures)} workers failed: {failures[0]}")
    return f"publisher {cpu:.2f} s of CPU, workers {sum(spent for spent, _ in answers):.1f} s of CPU, wall {wall:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=sized([31, 63, 127], [3]))
    parser.add_argument("--group-sizes", type=int, nargs="+", default=sized([4096, 32], [4096, 2]))
    parser.add_argument("--pushes", type=int, default=sized(3, 1))
    parser.add_argument("--processes", type=int, default=sized(4, 2))
    arguments = parser.parse_args()
    allow_files()
    context, staged = multiprocessing.get_context("spawn"), stage_version()
    for num_workers in arguments.workers:
        bounds = [1 + number * num_workers // arguments.processes for number in range(arguments.processes + 1)]
        pairs = [context.Pipe() for _ in range(arguments.processes)]
        processes = [
            context.Process(target=receive, args=(range(first, after), num_workers + 1, far), daemon=True)
            for first, after, (_, far) in zip(bounds, bounds[1:], pairs, strict=False)
        ]
        for process in processes:
            process.start()
        pipes = [near for near, _ in pairs]
        for pipe in pipes:
            pipe.recv()
        for group_size in arguments.group_sizes:
            sender = GlooSender("127.0.0.1", group_size)
            for _ in range(arguments.pushes):
                figures = push(staged, sender, num_workers, pipes)
                print(f"{num_workers} workers, groups of {group_size}: {figures}", flush=True)
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join(30)


if __name__ == "__main__":
    main()
