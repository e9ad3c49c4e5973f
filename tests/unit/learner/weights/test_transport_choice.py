"""The transport that `auto` picks, by where the publisher and the members are."""

from __future__ import annotations

import pytest

from penstock.weights.transports import TRANSPORTS
from penstock_learner.weights.memory import MemoryKind
from penstock_learner.weights.senders.sender import PushTarget
from penstock_learner.weights.senders.transport_choice import PublisherPlace, choose_transport


def member(*devices: str, host_id: str = "host", transports: tuple[str, ...] = TRANSPORTS) -> PushTarget:
    return PushTarget("server", "address", devices, host_id, transports)


def chosen(memory: MemoryKind, device: str, *members: PushTarget, has_cupy: bool = True) -> str:
    return choose_transport(PublisherPlace("host", device, memory, has_cupy), members)[0]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([member("GPU-0"), member("GPU-0")], "cuda_ipc"),
        ([member("GPU-1", "GPU-2"), member("GPU-3")], "nccl"),
        ([member("GPU-0"), member("GPU-1")], "gloo"),
        ([member("GPU-1"), member("GPU-1")], "gloo"),
        ([member("GPU-1"), member("cpu")], "gloo"),
        ([member("GPU-1", transports=("shm", "gloo", "snapshot"))], "gloo"),
    ],
    ids=["one GPU", "a GPU each", "one shares the publisher's", "two share one", "one has none", "no CuPy at a member"],
)
def test_a_publisher_on_a_gpu(members: list[PushTarget], expected: str) -> None:
    assert chosen("device", "GPU-0", *members) == expected
    assert chosen("device", "GPU-0", *members, has_cupy=False) == "gloo"


def test_a_publisher_in_host_memory() -> None:
    near, far = member("cpu"), member("cpu", host_id="elsewhere")
    assert chosen("shared", "cpu", near, near) == "shm"
    assert chosen("shared", "cpu", near, far) == "gloo"
    assert chosen("host", "cpu", near) == "gloo"
