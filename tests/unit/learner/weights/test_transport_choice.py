"""The transport that `auto` picks, by where the publisher and the members are."""

from __future__ import annotations

import pytest

from penstock.weights.transports import TRANSPORTS
from penstock_learner.weights.senders import PublisherPlace, PushTarget, choose_transport
from penstock_learner.weights.staging import MemoryKind

NCCL = "2.28.9"


def member(
    *devices: str, host_id: str = "elsewhere", transports: tuple[str, ...] = TRANSPORTS, nccl_version: str = NCCL
) -> PushTarget:
    return PushTarget("server", "address", devices, host_id, transports, nccl_version)


def chosen(memory: MemoryKind, device: str, *members: PushTarget, has_cupy: bool = True) -> str:
    return choose_transport(PublisherPlace("host", device, memory, has_cupy, NCCL), members)[0]


@pytest.mark.parametrize(
    ("members", "on_gpu", "on_host"),
    [
        ([member("GPU-0"), member("GPU-0")], "cuda_ipc", "gloo"),
        ([member("GPU-1", "GPU-2"), member("GPU-3")], "nccl", "nccl"),
        ([member("GPU-1", host_id="host"), member("GPU-2", host_id="host")], "nccl", "nccl"),
        ([member("GPU-0"), member("GPU-1")], "gloo", "gloo"),
        ([member("GPU-1"), member("GPU-1")], "gloo", "gloo"),
        ([member("GPU-1"), member("cpu")], "gloo", "gloo"),
        ([member("GPU-1", transports=("shm", "gloo", "snapshot"))], "gloo", "gloo"),
        ([member("GPU-1"), member("GPU-2", nccl_version="2.27.3")], "gloo", "gloo"),
        ([member("GPU-1", nccl_version="")], "gloo", "gloo"),
    ],
    ids=[
        "one GPU", "a GPU each", "a GPU each on one host", "one shares the publisher's", "two share one",
        "one has none", "no CuPy at a member", "another NCCL at a member", "no NCCL at a member",
    ],
)  # fmt: skip
@pytest.mark.parametrize("host_memory", ["host", "shared"])
def test_a_publisher_with_a_gpu(members: list[PushTarget], on_gpu: str, on_host: str, host_memory: MemoryKind) -> None:
    """NCCL is taken whenever every member can, wherever the publisher stages the weights."""
    assert chosen("device", "GPU-0", *members) == on_gpu
    assert chosen(host_memory, "GPU-0", *members) == on_host
    assert chosen("device", "GPU-0", *members, has_cupy=False) == "gloo"


def test_a_publisher_without_a_gpu() -> None:
    near, far = member("cpu", host_id="host"), member("cpu")
    assert chosen("shared", "cpu", near, near) == "shm"
    assert chosen("shared", "cpu", near, far) == "gloo"
    assert chosen("host", "cpu", near) == "gloo"
    assert chosen("shared", "cpu", member("GPU-1")) == "gloo"


def test_the_reason_names_the_versions_of_nccl_that_differ() -> None:
    place = PublisherPlace("host", "GPU-0", "device", True, NCCL)
    _, reason = choose_transport(place, [member("GPU-1"), member("GPU-2", nccl_version="2.27.3")])
    assert reason == (
        "the learner has NCCL 2.28.9 and the rollout server 2.27.3; install the same nvidia-nccl-cu13 in both"
    )
