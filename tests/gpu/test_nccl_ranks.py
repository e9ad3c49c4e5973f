"""Pushes by nccl between processes: content, kept groups, and faults in every phase, over NCCL and over its stand-in.

Every test runs with both bindings, so that the stand-in behaves as NCCL does. With NCCL all ranks share one GPU: each
process says that it is a host of its own. On a GPU: `python -m pytest tests/gpu/test_nccl_ranks.py -k real -n 3`.
"""

from __future__ import annotations

import fcntl
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.config.loading import dump_config, validate
from penstock.weights.transports import has_cupy
from penstock_rollout.weights.stage import merged_weights
from support.cuda_stand_ins import NcclBinding
from support.staging_engine import named_digest
from support.weight_group import TERM_FILE, MemberOptions, MemberProcess, PublisherProcess, Pushed, Shapes, make_adapter

REAL = pytest.param(
    "real", marks=pytest.mark.skipif(not (torch.cuda.is_available() and has_cupy()), reason="needs a GPU and CuPy")
)
BINDINGS = ["stand-in", REAL]
LONG_BINDINGS = [pytest.param("stand-in", marks=pytest.mark.long), REAL]
"""For tests of which `make test` has a quicker sibling."""
KINDS = ["die", "stop", "slow", "disconnect"]
PHASES = ["meeting", "start", "connection", "first bucket", "middle", "commit"]
PUSH_TIMEOUT_S = 8.0
NUM_PUSHES = int(os.environ.get("PENSTOCK_NCCL_PUSHES", "200"))
"""Pushes of the random test with NCCL. The stand-in makes a fifth of them."""
MAX_GROWTH_BYTES = 64 * 2**20


@dataclass
class World:
    """A publisher and its members. Everything that a push must leave behind is checked in `push`."""

    folder: Path
    config_file: Path
    binding: NcclBinding
    shapes: Shapes
    publisher: PublisherProcess
    members: list[MemberProcess] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    version: int = 0

    def launch(self, num_workers: int = 1, fault: str = "", nccl_version: str = "") -> MemberProcess:
        binding = NcclBinding(self.binding.is_real, self.binding.in_place, nccl_version)
        options = MemberOptions(num_workers, fault, binding=binding)
        output = self.folder / f"member-{len(self.members)}"
        self.members.append(MemberProcess.launch(self.config_file, output, options))
        return self.members[-1]

    def push(self, *members: MemberProcess, changed: float = 1.0, base: int | None = None) -> Pushed:
        """Push the next version."""
        self.version += 1
        targets = [member.target for member in members]
        pushed: Pushed = self.publisher.call("push", self.version, targets, changed, base)
        return self.judge(self.version, pushed)

    def judge(self, version: int, pushed: Pushed) -> Pushed:
        self.digests[version] = pushed.digest
        for member in self.members:
            if member.server_id in pushed.committed:
                assert member.loads[-1] == (version, [pushed.digest])
            assert all(found == [self.digests[loaded]] for loaded, found in member.loads), "loaded a mixture"
        return pushed

    def push_to_all(self, *members: MemberProcess, **named: object) -> Pushed:
        """Push the next version, which every member must load."""
        pushed = self.push(*members, **named)  # type: ignore[arg-type]
        assert sorted(pushed.committed) == sorted(member.server_id for member in members), pushed
        assert pushed.failed == {}
        return pushed

    def recover(self, *members: MemberProcess) -> None:
        """Push until every member has the version. The first push may find that the group it kept is broken."""
        pushed = self.push(*members)
        if pushed.failed:
            self.push_to_all(*members)

    def replace_publisher(self) -> None:
        """Start the publisher of the next term."""
        self.publisher.kill()
        (self.folder / TERM_FILE).write_text("2")
        self.publisher = PublisherProcess.start(self.config_file, self.binding, self.shapes, term=2)

    def stop(self) -> None:
        self.publisher.kill()
        for member in self.members:
            member.kill()


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeWorld]:
    """Make the world of a test, with a publisher. Kills every process at the end."""
    worlds: list[World] = []

    def make(
        binding: str, *, memory: str = "device", fault: str = "", num_items: int = 0, delta: bool = False,
        push_timeout_s: float = PUSH_TIMEOUT_S,
    ) -> World:  # fmt: skip
        is_real = binding == "real"
        shapes = Shapes(num_items=num_items or (2**20 if is_real else 4096))
        weights = {
            "transport": "nccl", "bucket_bytes": 4 * shapes.num_items, "delta": delta,
            "ready_timeout_s": push_timeout_s / 2, "push_timeout_s": push_timeout_s,
            "staging": "host" if memory == "host" else "auto",
        }  # fmt: skip
        model = {"path": str(tmp_path / "model"), "dtype": "float32"}
        config = validate({"run": "push", "run_dir": str(tmp_path), "model": model, "weights": weights}, "test")
        file = tmp_path / "config.yaml"
        file.write_text(dump_config(config))
        chosen = NcclBinding(is_real, in_place=memory == "device")
        publisher = PublisherProcess.start(file, chosen, shapes, fault=fault)
        worlds.append(World(tmp_path, file, chosen, shapes, publisher))
        return worlds[-1]

    with gpu_lock(request.node.name) if "real" in request.node.name else nullcontext():
        yield make
        for world in worlds:
            world.stop()


@contextmanager
def gpu_lock(test: str) -> Iterator[None]:
    """Tests in parallel processes share the GPU, except a test that measures its memory, which has it alone."""
    with (Path(tempfile.gettempdir()) / f"penstock-gpu-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if "alone" in test else fcntl.LOCK_SH)
        yield


@pytest.mark.timeout(600)
@pytest.mark.parametrize("binding", LONG_BINDINGS)
def test_many_pushes_with_random_joins_and_deaths(binding: str, make_world: MakeWorld) -> None:
    world = make_world(binding, num_items=2**18 if binding == "real" else 1024)
    chance = random.Random(7)
    members, spare = [world.launch(), world.launch()], world.launch()
    num_deaths = num_joins = 0
    for _ in range(NUM_PUSHES if binding == "real" else NUM_PUSHES // 5):
        victim = None
        if chance.random() < 0.05 and len(members) < 4:
            members.append(spare)
            spare, num_joins = world.launch(), num_joins + 1
        elif chance.random() < 0.05 and len(members) > 1:
            victim = members.pop(chance.randrange(len(members)))
            num_deaths += 1
        killing = threading.Timer(chance.uniform(0.0, 0.1), victim.kill if victim else lambda: None)
        killing.start()
        pushed = world.push(*members, *([victim] if victim else []))
        killing.join()
        if victim is None:
            assert pushed.failed == {}, pushed
        else:
            world.recover(*members)
    assert num_joins + num_deaths > 0
    world.push_to_all(*members)


CONTENT = [
    pytest.param("stand-in", 3, "device"),
    pytest.param("stand-in", 3, "host"),
    *(pytest.param("stand-in", number, "device", marks=pytest.mark.long) for number in (1, 7)),
    *(pytest.param("real", number, "device", marks=REAL.marks) for number in (1, 3, 7)),
    pytest.param("real", 3, "host", marks=REAL.marks),
]


@pytest.mark.parametrize(("binding", "num_members", "memory"), CONTENT)
def test_every_member_gets_every_version_by_one_group(
    binding: str, num_members: int, memory: str, make_world: MakeWorld
) -> None:
    """With `host` both ends stage in host memory, and every bucket goes through two buffers on the GPU."""
    world = make_world(binding, memory=memory)
    members = [world.launch() for _ in range(num_members)]
    pushes = [world.push_to_all(*members) for _ in range(4)]
    assert len(set(world.digests.values())) == len(pushes)
    assert pushes[-1].num_groups == 1, "the group is kept while the members are the same"


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_group_is_replaced_when_members_join_or_leave(binding: str, make_world: MakeWorld) -> None:
    world = make_world(binding)
    first, late = world.launch(), world.launch()
    num_groups = []
    for members in ([first], [first, late], [late, first], [late, first], [late]):
        num_groups.append(world.push_to_all(*members).num_groups)
    assert num_groups == [1, 2, 3, 3, 4], "another order has other ranks"


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_late_joiner_catches_up_while_the_others_get_the_next_version(binding: str, make_world: MakeWorld) -> None:
    world = make_world(binding)
    early, late = world.launch(), world.launch()
    world.push_to_all(early)
    world.version += 2
    caught_up, pushed = world.publisher.call("push_concurrently", world.version, [late.target], [early.target])
    world.digests |= {world.version - 1: caught_up.digest, world.version: pushed.digest}
    world.judge(world.version - 1, caught_up)
    world.judge(world.version, pushed)
    assert caught_up.committed == [late.server_id]
    assert pushed.committed == [early.server_id]
    world.push_to_all(early, late)


@pytest.mark.parametrize("binding", BINDINGS)
def test_every_worker_of_a_tensor_parallel_member_gets_the_weights(binding: str, make_world: MakeWorld) -> None:
    world = make_world(binding)
    one, pair = world.launch(), world.launch(num_workers=2)
    whole = world.push_to_all(one, pair)
    assert whole.num_bytes == 3 * world.shapes.num_tensors * 4 * world.shapes.num_items
    assert world.push_to_all(one, pair).num_groups == 1
    pair.kill()
    world.push_to_all(one)


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_delta_and_an_adapter_arrive(binding: str, make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world(binding, delta=True)
    folder = tmp_path / "model"
    folder.mkdir()
    base = {name: torch.full(shape, 2.0) for name, shape in world.shapes.named}
    save_file(base, folder / "model.safetensors")
    members = [world.launch(), world.launch()]
    whole = world.push_to_all(*members, changed=0.02)
    delta = world.push_to_all(*members, changed=0.02, base=world.version)
    assert delta.num_bytes < whole.num_bytes / 5
    world.version += 1
    pushed = world.publisher.call("push_adapter", world.version, [member.target for member in members], 0.5)
    world.judge(world.version, pushed)
    adapter = make_adapter(world.version, world.shapes)
    expected = named_digest(dict(merged_weights(folder, adapter, 0.5)))
    assert [member.loaded_tensors for member in members] == [[expected]] * 2


@pytest.mark.parametrize("binding", BINDINGS)
def test_another_version_of_nccl_is_refused_before_anybody_waits(binding: str, make_world: MakeWorld) -> None:
    """The publisher compares the version that the server reported, and the server compares that of the meeting."""
    world = make_world(binding)
    good, other = world.launch(), world.launch(nccl_version="2.1.0")
    unaware = replace(other.target, nccl_version=good.target.nccl_version)
    for version, target in enumerate([other.target, unaware], start=1):
        pushed = world.judge(version, world.publisher.call("push", version, [good.target, target]))
        assert pushed.committed == [good.server_id]
        assert pushed.num_groups == version, "no group was formed with the other one"
        assert "and the rollout server 2.1.0; install the same nvidia-nccl-cu13" in pushed.failed[other.server_id]


FAULTS = [
    pytest.param(binding, kind, phase, marks=marks)
    for kind in KINDS
    for phase in PHASES
    for binding, marks in [
        ("stand-in", () if phase == "middle" and kind != "stop" else pytest.mark.long),
        ("real", REAL.marks),
    ]
]


@pytest.mark.parametrize(("binding", "kind", "phase"), FAULTS)
def test_a_faulty_member_delays_no_one_past_the_deadline_and_the_next_group_is_right(
    binding: str, kind: str, phase: str, make_world: MakeWorld
) -> None:
    world = make_world(binding)
    first, faulty, last = world.launch(), world.launch(fault=f"{kind}@{phase}"), world.launch()
    world.push_to_all(first, last)
    pushed = world.push(first, faulty, last)
    assert faulty.has_hung, "the fault happened"
    alive = [first, last]
    if kind == "slow":
        assert pushed.failed == {}
    if kind in ("die", "stop"):
        assert sorted(pushed.committed) == sorted([first.server_id, last.server_id]), pushed
        assert list(pushed.failed) == [faulty.server_id]
    if kind != "die":
        alive.append(faulty)
    if kind == "stop":
        faulty.resume()
    if kind == "disconnect":
        faulty.wait_for("connected")
    world.recover(*alive)
    assert [member.loads[-1][0] for member in alive] == [world.version] * len(alive)


@pytest.mark.parametrize(
    ("binding", "phase"),
    [
        pytest.param(binding, phase, marks=marks)
        for phase in PHASES
        for binding, marks in [
            ("stand-in", () if phase == "middle" else pytest.mark.long),
            ("real", REAL.marks),
        ]
    ],
)
def test_a_publisher_that_is_killed_leaves_whole_versions_and_the_next_one_pushes(
    binding: str, phase: str, make_world: MakeWorld
) -> None:
    world = make_world(binding, fault=f"die@{phase}")
    members = [world.launch(), world.launch()]
    world.publisher.ask("push", 1, [member.target for member in members])
    world.publisher.wait_for_death()
    assert [member.loads for member in members] == [[], []]
    world.replace_publisher()
    world.version = 1
    world.push_to_all(*members)
    assert world.push_to_all(*members).num_groups == 1


@pytest.mark.parametrize("binding", LONG_BINDINGS)
def test_alone_memory_stays_flat_over_pushes_joins_and_faults(binding: str, make_world: MakeWorld) -> None:
    world = make_world(binding, memory="host", push_timeout_s=4.0)
    one, two, three = (world.launch() for _ in range(3))

    def one_round() -> None:
        for members in ([one, two], [one, two, three], [one, two, three]):
            world.push_to_all(*members)
        three.stop()
        pushed = world.push(one, two, three)
        assert list(pushed.failed) == [three.server_id]
        three.resume()
        world.recover(one, two, three)

    one_round()
    before = world.publisher.call("used")
    one_round()
    after = world.publisher.call("used")
    print(f"used before {before}, after {after}")
    assert after.pop("bytes") - before.pop("bytes") <= MAX_GROWTH_BYTES
    assert after == before
