"""Every transport, with members in separate processes: content, versions, deltas, faults in every phase."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch

from penstock.config.loading import dump_config
from penstock.config.run import RunConfig
from penstock.internal_calls import ClusterKey
from penstock.v1 import weights_pb2, weights_pb2_grpc
from penstock.weights import cuda
from penstock.weights.transports import Deadline
from penstock_learner.weights import deltas
from penstock_learner.weights.publisher import WeightPublisher
from penstock_learner.weights.senders import PushReport, PushTarget, Shipment, make_sender
from penstock_learner.weights.staging import SharedBuckets, StagedVersion
from support.cuda_stand_ins import install_nccl_stand_in
from support.learner_runs import make_config
from support.weight_group import MemberProcess, stage_weights

TRANSPORTS = ["nccl", "gloo", "shm", "snapshot"]
PHASES = ["announce", "receive", "commit", "load"]
SHAPES = [("embed", (64, 96)), ("layer.0", (96, 96)), ("layer.1", (96, 96)), ("norm", (96,)), ("head", (64, 96))]

Start = Callable[..., MemberProcess]


def config_of(folder: Path, transport: str, **weights: object) -> RunConfig:
    config = make_config(folder, folder / "no-model", "redis://unused", "push")
    update = {"transport": transport, "bucket_bytes": 30_000, "ready_timeout_s": 60.0, "push_timeout_s": 60.0}
    return config.model_copy(update={"weights": config.weights.model_copy(update=update | weights)})


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace CuPy's bindings by a stand-in over gloo, because the tests run without a GPU."""
    monkeypatch.setattr(cuda, "runtime", cuda.runtime)  # restored after the test
    monkeypatch.setattr(cuda, "nccl", cuda.nccl)
    stand_in = install_nccl_stand_in()
    yield
    stand_in.stop()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start members, and kill them at the end, including stopped ones."""
    members: list[MemberProcess] = []

    def start_one(config: RunConfig, num_workers: int = 1, fault: str = "") -> MemberProcess:
        file = tmp_path / "config.yaml"
        file.write_text(dump_config(config))
        members.append(MemberProcess.start(file, tmp_path / f"member-{len(members)}", num_workers, fault))
        return members[-1]

    yield start_one
    for member in members:
        member.kill()


stage = partial(stage_weights, SHAPES)


def targets(*members: MemberProcess) -> list[PushTarget]:
    return [member.target for member in members]


def assert_committed(report: PushReport, *members: MemberProcess) -> None:
    assert sorted(report.committed) == sorted(member.target.server_id for member in members), report


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_version_arrives_byte_for_byte_at_every_worker(transport: str, tmp_path: Path, start: Start) -> None:
    config = config_of(tmp_path, transport)
    publisher = WeightPublisher(config, "127.0.0.1")
    one, pair = start(config), start(config, num_workers=2)
    expected = []
    for version in range(1, 6):
        digest = stage(publisher, version, keep=(version - 1,))
        report = publisher.push(version, targets(one, pair))
        assert_committed(report, one, pair)
        assert report.transport == transport
        assert report.weights_digest == digest
        expected.append((version, [digest]))
    assert one.loads == expected
    assert pair.loads == expected, "both workers hold the same bytes"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_member_that_dies_leaves_and_the_others_commit(
    transport: str, phase: str, tmp_path: Path, start: Start
) -> None:
    config = config_of(tmp_path, transport)
    publisher = WeightPublisher(config, "127.0.0.1")
    healthy, dying = start(config), start(config, fault=f"die@{phase}")
    digest = stage(publisher, 1)
    report = publisher.push(1, targets(dying, healthy))
    assert_committed(report, healthy)
    assert list(report.failed) == [dying.target.server_id]
    assert healthy.loads == [(1, [digest])]
    assert dying.loads == []


def test_a_push_that_would_start_again_gives_way_to_a_newer_version(tmp_path: Path, start: Start) -> None:
    config = config_of(tmp_path, "gloo")
    publisher = WeightPublisher(config, "127.0.0.1")
    dying, other = start(config, fault="die@announce"), start(config)
    stage(publisher, 1)
    digest = stage(publisher, 2, keep=(1,))
    report = publisher.push(1, targets(dying, other))
    assert report.committed == []
    assert report.failed.keys() == {dying.target.server_id}
    assert report.superseded == [other.target.server_id]
    assert_committed(publisher.push(2, targets(other)), other)
    assert other.loads == [(2, [digest])]


@pytest.mark.fault_row(
    "weights", "members hang at any phase of a push by {transport}", how="SIGSTOP at each phase",
    must="no one waits past the deadline; the others commit; no one loads a mixture",
)  # fmt: skip
@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_members_that_hang_at_any_phase_delay_no_one_past_the_deadline_and_never_load_a_mixture(
    transport: str, tmp_path: Path, start: Start
) -> None:
    config = config_of(tmp_path, transport, ready_timeout_s=3.0, push_timeout_s=4.0)
    publisher = WeightPublisher(config, "127.0.0.1")
    healthy = start(config)
    hanging = [start(config, fault=f"stop@{phase}") for phase in PHASES]
    digests: dict[int, str] = {}
    version = 0
    # A member that waits for a hanging one may fail before its own fault happens. It then happens in the next push.
    while waiting := [member for member in hanging if not member.has_hung]:
        version += 1
        assert version <= len(PHASES), "every push makes one hang at least"
        digests[version] = stage(publisher, version, keep=(version - 1,))
        report = publisher.push(version, targets(*waiting, healthy))
        assert_committed(report, healthy)
        assert sorted(report.failed) == sorted(member.target.server_id for member in waiting)

    beyond, last = version + 1, version + 2
    digests[beyond] = stage(publisher, beyond, keep=(version,))
    assert_committed(publisher.push(beyond, targets(healthy)), healthy)
    digests[last] = stage(publisher, last, keep=(beyond,))  # must not reuse the memory that they still read
    for member in hanging:
        member.resume()
    # A channel to a member that was silent waits a second before it tries again. Until then a push goes on without it.
    while (report := publisher.push(last, targets(*hanging, healthy))).failed and last < version + 4:
        last += 1
        digests[last] = stage(publisher, last, keep=(last - 1,))
    assert_committed(report, *hanging, healthy)
    for member in (*hanging, healthy):
        assert member.loads[-1] == (last, [digests[last]])
        for loaded, found in member.loads:
            assert found == [digests[loaded]], "whatever was loaded was one whole version"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_joiner_catches_up_in_a_lane_of_its_own(transport: str, tmp_path: Path, start: Start) -> None:
    config = config_of(tmp_path, transport)
    publisher = WeightPublisher(config, "127.0.0.1")
    early = start(config)
    first = stage(publisher, 1)
    assert_committed(publisher.push(1, targets(early)), early)
    late = start(config)
    second = stage(publisher, 2, keep=(1,))
    catching_up = threading.Thread(target=publisher.push, args=(1, targets(late)), kwargs={"lane": "catch_up"})
    catching_up.start()
    assert_committed(publisher.push(2, targets(early)), early)
    catching_up.join(120)
    assert not catching_up.is_alive()
    assert early.loads == [(1, [first]), (2, [second])]
    assert late.loads == [(1, [first])]


@pytest.mark.fault_row(
    "weights", "corrupted push by {transport}", how="a byte of a bucket is flipped after its checksum was made",
    must="the member refuses it and keeps the old version; the next push works",
)  # fmt: skip
@pytest.mark.parametrize("transport", ["nccl", "gloo", "snapshot"])
def test_corrupted_bytes_are_refused(transport: str, tmp_path: Path, start: Start) -> None:
    config = config_of(tmp_path, transport)
    publisher = WeightPublisher(config, "127.0.0.1")
    member = start(config)
    stage(publisher, 1)
    publisher.staged[1].memory.buckets[-1][5] ^= 1
    report = publisher.push(1, targets(member))
    assert "is corrupt" in report.failed[member.target.server_id]
    digest = stage(publisher, 2)
    assert_committed(publisher.push(2, targets(member)), member)
    assert member.loads == [(2, [digest])]


def test_shared_memory_cannot_be_written_by_others_nor_taken_for_another_version(tmp_path: Path, start: Start) -> None:
    config = config_of(tmp_path, "shm", push_timeout_s=3.0)
    publisher = WeightPublisher(config, "127.0.0.1")
    member = start(config)
    stage(publisher, 1)
    memory = publisher.staged[1].memory
    assert isinstance(memory, SharedBuckets)
    with pytest.raises(PermissionError), Path(memory.path).open("r+b") as writer:
        writer.write(b"x")
    manifest = publisher.staged[1].manifest
    memory.seal(weights_pb2.WeightManifest(run="push", term=1, policy_version=7), ["0" * 32] * len(manifest.buckets))
    report = publisher.push(1, targets(member))
    assert report.committed == []
    assert member.loads == []


def unmet_rendezvous(transport: str, staged: StagedVersion, member: MemberProcess, folder: Path) -> str:
    """Return the rendezvous of a transfer that never begins."""
    if transport == "snapshot":
        return str(folder / "never-written")
    sender = make_sender(transport, "127.0.0.1", torch.device("cpu"), gloo_group_size=8)
    return sender.open(Shipment(staged.manifest, staged), targets(member), Deadline(60, "a test"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_aborted_stage_is_forgotten_at_once(transport: str, tmp_path: Path, start: Start) -> None:
    config = config_of(tmp_path, transport)
    publisher = WeightPublisher(config, "127.0.0.1")
    member = start(config)
    begun = publisher.begin(1, 1, SHAPES)
    announcement = weights_pb2.AnnounceRequest(
        manifest=begun.manifest, transport=transport, rank=1, world_size=2, deadline_s=60,
        rendezvous=unmet_rendezvous(transport, begun, member, tmp_path),
    )  # fmt: skip
    with grpc.insecure_channel(member.target.address) as channel:
        stub = weights_pb2_grpc.WeightMemberServiceStub(channel)
        key = ClusterKey.of(config).metadata()
        stub.Announce(announcement, timeout=30, metadata=key)
        stub.Abort(weights_pb2.AbortRequest(policy_version=1, term=1, reason="a test"), timeout=30, metadata=key)
        commit = weights_pb2.CommitRequest(policy_version=1, term=1, bucket_checksums=[], deadline_s=60)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Commit(commit, timeout=30, metadata=key)
        assert refused.value.code() is grpc.StatusCode.ABORTED
    digest = stage(publisher, 1)
    assert_committed(publisher.push(1, targets(member)), member)
    assert member.loads == [(1, [digest])]


@pytest.mark.parametrize("transport", ["nccl", "gloo", "snapshot"])
def test_a_delta_carries_only_what_changed(transport: str, tmp_path: Path, start: Start) -> None:
    config = config_of(tmp_path, transport, delta=True)
    publisher = WeightPublisher(config, "127.0.0.1")
    member = start(config)
    digests = [stage(publisher, 1, changed=0.02)]
    whole = publisher.push(1, targets(member))
    assert_committed(whole, member)
    digests.append(stage(publisher, 2, keep=(1,), changed=0.02))
    delta = publisher.push(2, targets(member), base_version=1)
    assert_committed(delta, member)
    if transport != "snapshot":
        assert delta.num_bytes < whole.num_bytes / 5
    digests.append(stage(publisher, 3, keep=(2,), changed=1.0))
    everything_changed = publisher.push(3, targets(member), base_version=2)
    assert everything_changed.num_bytes == whole.num_bytes
    assert member.loads == [(version, [digest]) for version, digest in enumerate(digests, start=1)]


def test_a_member_without_the_base_gets_whole_buckets(tmp_path: Path, start: Start) -> None:
    config = config_of(tmp_path, "gloo", delta=True)
    publisher = WeightPublisher(config, "127.0.0.1")
    old, new = start(config), start(config)
    stage(publisher, 1, changed=0.02)
    assert_committed(publisher.push(1, targets(old)), old)
    digest = stage(publisher, 2, keep=(1,), changed=0.02)
    report = publisher.push(2, targets(old, new), base_version=1)
    assert_committed(report, old, new)
    assert old.loads[-1] == new.loads[-1] == (2, [digest])


def test_auto_tries_a_delta_and_whole_buckets_and_then_decides(tmp_path: Path, start: Start) -> None:
    config = config_of(tmp_path, "gloo")
    assert config.weights.delta == "auto"
    publisher = WeightPublisher(config, "127.0.0.1")
    member = start(config)
    digests, sizes = [], []
    for version in range(1, 6):
        digests.append(stage(publisher, version, keep=(version - 1,), changed=0.02))
        report = publisher.push(version, targets(member), base_version=version - 1)
        assert_committed(report, member)
        sizes.append(report.num_bytes)
    whole, delta = sizes[0], sizes[1]
    assert delta < whole / 5
    assert sizes[2] == whole
    assert all(size == whole or size < whole / 5 for size in sizes[3:])
    assert member.loads == [(version, [digest]) for version, digest in enumerate(digests, start=1)]


@pytest.mark.parametrize("transport", ["nccl", "gloo"])
def test_a_member_that_dies_in_a_delta_leaves_and_the_others_are_exact(
    transport: str, tmp_path: Path, start: Start
) -> None:
    """The healthy member may have applied a part of the delta to its only copy of the base when the other one dies."""
    config = config_of(tmp_path, transport, delta=True)
    publisher = WeightPublisher(config, "127.0.0.1")
    digests = [stage(publisher, 1, changed=0.02)]
    num_buckets = len(publisher.staged[1].memory.buckets)
    healthy, dying = start(config), start(config, fault=f"die@receive#{num_buckets + 2}")
    first = publisher.push(1, targets(healthy, dying))
    assert_committed(first, healthy, dying)
    whole = first.num_bytes // 2
    digests.append(stage(publisher, 2, keep=(1,), changed=0.02))
    report = publisher.push(2, targets(healthy, dying), base_version=1)
    assert dying.has_hung, report
    assert list(report.failed) == [dying.target.server_id]
    assert_committed(report, healthy)
    digests.append(stage(publisher, 3, keep=(2,), changed=0.02))
    assert publisher.push(3, targets(healthy), base_version=2).num_bytes < whole / 5
    assert healthy.loads == [(version, [digest]) for version, digest in enumerate(digests, start=1)]


@pytest.mark.parametrize("transport", ["nccl", "gloo"])
def test_a_member_whose_delta_was_aborted_gets_whole_buckets(transport: str, tmp_path: Path, start: Start) -> None:
    config = config_of(tmp_path, transport, delta=True)
    publisher = WeightPublisher(config, "127.0.0.1")
    one, other = start(config), start(config)
    digests = [stage(publisher, 1, changed=0.02)]
    first = publisher.push(1, targets(one, other))
    assert_committed(first, one, other)
    whole = first.num_bytes // 2
    other.stop()
    digests.append(stage(publisher, 2, keep=(1,), changed=0.02))
    report = publisher.push(2, targets(one, other), base_version=1)
    assert list(report.failed) == [other.target.server_id]
    assert_committed(report, one)
    assert report.num_bytes == whole, "the second attempt sends no delta"
    assert one.loads == [(version, [digest]) for version, digest in enumerate(digests, start=1)]


def test_without_memory_for_a_delta_the_buckets_are_sent_whole(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(deltas, "encode", no_memory)
    config = config_of(tmp_path, "gloo", delta=True)
    publisher = WeightPublisher(config, "127.0.0.1")
    member = start(config)
    stage(publisher, 1, changed=0.02)
    whole = publisher.push(1, targets(member))
    digest = stage(publisher, 2, keep=(1,), changed=0.02)
    report = publisher.push(2, targets(member), base_version=1)
    assert_committed(report, member)
    assert report.num_bytes == whole.num_bytes
    assert member.loads[-1] == (2, [digest])


def test_a_member_that_missed_a_version_gets_whole_buckets(tmp_path: Path, start: Start) -> None:
    config = config_of(tmp_path, "gloo", delta=True)
    publisher = WeightPublisher(config, "127.0.0.1")
    steady, absent = start(config), start(config)
    stage(publisher, 1, changed=0.02)
    first = publisher.push(1, targets(steady, absent))
    assert_committed(first, steady, absent)
    whole = first.num_bytes // 2
    stage(publisher, 2, keep=(1,), changed=0.02)
    assert publisher.push(2, targets(steady), base_version=1).num_bytes < whole / 5
    digest = stage(publisher, 3, keep=(2,), changed=0.02)
    report = publisher.push(3, targets(steady, absent), base_version=2)
    assert_committed(report, steady, absent)
    assert report.num_bytes == 2 * whole
    assert steady.loads[-1] == absent.loads[-1] == (3, [digest])


def test_pages_of_the_publisher_are_not_a_base_of_a_delta(tmp_path: Path, start: Start) -> None:
    """After a push by shm a member holds the publisher's own pages, which the publisher writes again."""
    config = config_of(tmp_path, "auto", delta=True)
    publisher = WeightPublisher(config, "127.0.0.1")
    member = start(config)
    stage(publisher, 1, changed=0.02)
    whole = publisher.push(1, targets(member))
    assert whole.transport == "shm"
    digests = [stage(publisher, 2, keep=(1,), changed=0.02)]
    by_gloo = publisher.push(2, targets(member), transport="gloo", base_version=1)
    assert by_gloo.num_bytes == whole.num_bytes
    digests.append(stage(publisher, 3, keep=(2,), changed=0.02))
    assert publisher.push(3, targets(member), transport="gloo", base_version=2).num_bytes < whole.num_bytes / 5
    assert member.loads[1:] == [(2, [digests[0]]), (3, [digests[1]])]


def test_auto_takes_shared_memory_on_one_host_and_gloo_across_hosts(tmp_path: Path, start: Start) -> None:
    config = config_of(tmp_path, "auto")
    publisher = WeightPublisher(config, "127.0.0.1")
    member = start(config)
    stage(publisher, 1)
    assert publisher.push(1, targets(member)).transport == "shm"
    far = PushTarget(member.target.server_id, member.target.address, host_id="another", transports=("gloo", "shm"))
    stage(publisher, 2, keep=(1,))
    report = publisher.push(2, [far])
    assert report.transport == "gloo"
    assert_committed(report, member)
