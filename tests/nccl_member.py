"""One worker of a member in a separate process, over the stand-ins, for tests that kill it.

    nccl_member.py MANIFEST_HEX RENDEZVOUS RANK WORLD_SIZE

It prints `ready`, waits for a line, prints `meeting`, receives one bucket, prints `bucket`, and stops without closing
anything.
"""

from __future__ import annotations

import sys
import time

import torch

from cuda_stand_in import RuntimeStandIn
from nccl_stand_in import NcclStandIn
from penstock.v1 import weights_pb2
from penstock.weights.cuda import libraries
from penstock.weights.deadline import Deadline
from penstock_rollout.weights.receivers.nccl import receive
from penstock_rollout.weights.reception import Reception

LIFETIME_S = 120.0


def main(manifest: str, rendezvous: str, rank: str, world_size: str) -> None:
    runtime = RuntimeStandIn()
    nccl = NcclStandIn(runtime)
    libraries.runtime = lambda: runtime
    libraries.nccl = lambda: nccl
    reception = Reception(
        weights_pb2.AnnounceRequest(
            manifest=weights_pb2.WeightManifest.FromString(bytes.fromhex(manifest)),
            rendezvous=rendezvous,
            rank=int(rank),
            world_size=int(world_size),
        ),
        device=torch.device("cpu"),
        deadline=Deadline(LIFETIME_S, "receiving"),
    )
    print("ready", flush=True)
    sys.stdin.readline()
    print("meeting", flush=True)
    for _ in receive(reception):
        print("bucket", flush=True)
        time.sleep(LIFETIME_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
