"""A push by gloo through relays, with members in separate processes: content, deltas, and deaths in the middle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.config.loading import dump_config
from penstock.config.run import RunConfig
from penstock.v1 import weights_pb2
from penstock.weights.transports import group_places
from penstock_learner.weights.publisher import WeightPublisher
from support.learner_runs import make_config
from support.processes import until
from support.weight_group import MemberOptions, MemberProcess, stage_weights

NUM_MEMBERS, GROUP_SIZE = 8, 3
SHAPES = [(f"layer.{number}", (96, 96)) for number in range(6)]

Start = Callable[..., list[MemberProcess]]


def config_of(folder: Path, **weights: object) -> RunConfig:
    config = make_config(folder, folder / "no-model", "redis://unused", "push")
    update = {
        "transport": "gloo", "bucket_bytes": 30_000, "ready_timeout_s": 60.0, "push_timeout_s": 60.0,
        "gloo_group_size": GROUP_SIZE,
    }  # fmt: skip
    return config.model_copy(update={"weights": config.weights.model_copy(update=update | weights)})


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start NUM_MEMBERS members, some with a fault or more workers, and kill them at the end."""
    members: list[MemberProcess] = []

    def start_all(config: RunConfig, special: dict[int, MemberOptions] | None = None) -> list[MemberProcess]:
        file = tmp_path / "config.yaml"
        file.write_text(dump_config(config))
        for index in range(NUM_MEMBERS):
            options = (special or {}).get(index, MemberOptions())
            members.append(MemberProcess.launch(file, tmp_path / f"member-{index}", options))
        for member in members:
            member.wait_for("port")
        return members

    yield start_all
    for member in members:
        member.kill()


def stage(publisher: WeightPublisher, version: int, changed: float = 1.0) -> str:
    """Stage random weights beside those of the version before. Returns the digest of the bytes."""
    return stage_weights(SHAPES, publisher, version, keep=(version - 1,), changed=changed)


def ids(members: list[MemberProcess]) -> list[str]:
    return sorted(member.server_id for member in members)


def place_of(index: int) -> str:
    """What the member at this index is if all members have one worker."""
    places = group_places(index + 1, NUM_MEMBERS + 1, GROUP_SIZE)
    return "relay" if len(places) == 2 else "member behind a relay"


def test_every_version_arrives_byte_for_byte_whole_or_as_a_delta(tmp_path: Path, start: Start) -> None:
    """A member with two workers has one of them in the group of another relay."""
    config = config_of(tmp_path, delta=True)
    publisher = WeightPublisher(config, "127.0.0.1")
    members = start(config, {2: MemberOptions(num_workers=2)})
    targets = [member.target for member in members]
    digests, sizes = [], []
    for version in range(1, 4):
        digests.append(stage(publisher, version, changed=0.02))
        report = publisher.push(version, targets, base_version=version - 1 or None)
        assert sorted(report.committed) == ids(members), report
        sizes.append(report.num_bytes)
    assert sizes[1] < sizes[0] / 5
    for member in members:
        assert member.loads == [(version, [digest]) for version, digest in enumerate(digests, start=1)]


def assert_loaded_by_all_but(failing: MemberProcess, members: list[MemberProcess], publisher: WeightPublisher) -> None:
    """Push version 1. The failing member leaves the push, and all others load the version."""
    others = [member for member in members if member is not failing]
    digest = stage(publisher, 1)
    report = publisher.push(1, [member.target for member in members])
    assert failing.has_hung, report
    assert list(report.failed) == [failing.server_id], report
    assert sorted(report.committed) == ids(others)
    assert all(member.loads == [(1, [digest])] for member in others)


@pytest.mark.fault_row(
    "weights", "a {who} is killed in mid-push by gloo", how="SIGKILL when its first bucket has arrived",
    must="the push starts again without it; all others load the version, byte for byte",
)  # fmt: skip
@pytest.mark.parametrize(("who", "index"), [("relay", 2), ("member behind a relay", 3)])
def test_when_a_relay_or_another_member_dies_all_others_get_the_version(
    who: str, index: int, tmp_path: Path, start: Start
) -> None:
    assert place_of(index) == who
    config = config_of(tmp_path)
    publisher = WeightPublisher(config, "127.0.0.1")
    members = start(config, {index: MemberOptions(fault="die@receive")})
    dying = members[index]
    assert_loaded_by_all_but(dying, members, publisher)
    assert dying.loads == []


@pytest.mark.fault_row(
    "weights", "a {who} hangs in mid-push by gloo", how="SIGSTOP when its first bucket has arrived",
    must="no one waits past the deadline; the push starts again without it, and all others load the version",
)  # fmt: skip
@pytest.mark.parametrize(("who", "index"), [("relay", 2), ("member behind a relay", 3)])
def test_when_a_relay_or_another_member_hangs_all_others_get_the_version(
    who: str, index: int, tmp_path: Path, start: Start
) -> None:
    assert place_of(index) == who
    config = config_of(tmp_path, push_timeout_s=8.0)
    publisher = WeightPublisher(config, "127.0.0.1")
    members = start(config, {index: MemberOptions(fault="stop@receive")})
    hanging = members[index]

    def be_patient_afterwards() -> None:
        """Only the attempt that hangs has a short deadline. The next one takes the new config."""
        until(lambda: hanging.has_hung, "the member to hang")
        publisher.config = config_of(tmp_path)

    patience = threading.Thread(target=be_patient_afterwards)
    patience.start()
    assert_loaded_by_all_but(hanging, members, publisher)
    patience.join()
    hanging.resume()
    nothing = weights_pb2.AbortRequest(policy_version=99, term=1, reason="only to reach it")
    until(lambda: not publisher._calls.abort([hanging.target], nothing), "the channel to the member to be back")
    digest = stage(publisher, 2)
    report = publisher.push(2, [member.target for member in members])
    assert sorted(report.committed) == ids(members), report
    assert all(member.loads[-1] == (2, [digest]) for member in members)


def test_a_member_with_corrupt_bytes_keeps_its_version_and_the_others_commit(tmp_path: Path, start: Start) -> None:
    """Bytes are checked by each member against the publisher's checksums, wherever they came from."""
    config = config_of(tmp_path)
    publisher = WeightPublisher(config, "127.0.0.1")
    members = start(config)
    stage(publisher, 1)
    publisher.staged[1].memory.buckets[-1][5] ^= 1
    report = publisher.push(1, [member.target for member in members])
    assert sorted(report.failed) == ids(members)
    assert all("is corrupt" in why for why in report.failed.values())
    digest = stage(publisher, 2)
    assert sorted(publisher.push(2, [member.target for member in members]).committed) == ids(members)
    assert all(member.loads == [(2, [digest])] for member in members)
