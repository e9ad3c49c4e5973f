"""A role's ranks outlive their controller: who may adopt them, and who may call them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError

from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.errors import Fenced, ProcessDied, RoleDied, Unavailable
from penstock_learner.roles import role_group
from penstock_learner.roles.rank import Rank
from penstock_learner.roles.role_group import Reservation, RoleActors, RoleGroup, actor_class, run_with_ranks

NUM_RANKS = 2


class RecordingRank(Rank):
    """A rank without a process group or a model. It records the calls that reach it."""

    role = "policy"

    def __init__(self, config: RunConfig, rank: int, owner: str) -> None:
        super().__init__(config, rank, NUM_RANKS, owner)
        self.calls: list[str] = []

    def rendezvous(self) -> str:
        return "nowhere:1"

    def join(self, rendezvous: str) -> None:
        self.calls.append("join")

    def load(self) -> None:
        self.calls.append("load")

    def update(self) -> None:
        self.calls.append("update")


class FakeActor:
    """Calls a rank in this process as Ray would: at once, or with RayActorError after its death."""

    def __init__(self, rank: RecordingRank) -> None:
        self.rank = rank
        self.is_dead = False
        self.call = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._caller("call")))
        self.adopt = SimpleNamespace(remote=self._caller("adopt"))

    def _caller(self, method: str) -> Any:
        def remote(*arguments: Any) -> asyncio.Future[Any]:
            future = asyncio.get_running_loop().create_future()
            try:
                if self.is_dead:
                    raise RayActorError
                future.set_result(getattr(self.rank, method)(*arguments))
            except Exception as error:
                future.set_exception(error)
            return future

        return remote


class FakeCluster:
    """Stands for RoleActors: the sets of one role that are alive on a cluster."""

    name = "policy"
    role = SimpleNamespace(num_ranks=NUM_RANKS)

    def __init__(self) -> None:
        self.config = make_config()
        self.sets: dict[int, list[FakeActor]] = {}
        self.outlive_controller = True
        self.can_be_adopted = True
        self.is_released = False
        self.reserved = self
        self.group = object()
        self.num_removals = 0
        """How many more times ranks of an earlier controller remove the reservation while ranks are made in it."""

    def make(self, number: int, owner: str) -> list[FakeActor]:
        assert number not in self.sets, "the name is taken"
        self.sets[number] = [FakeActor(RecordingRank(self.config, rank, owner)) for rank in range(NUM_RANKS)]
        return self.sets[number]

    def find(self) -> dict[int, list[FakeActor]]:
        alive = {number: [actor for actor in actors if not actor.is_dead] for number, actors in self.sets.items()}
        return {number: actors for number, actors in alive.items() if actors}

    async def holds(self, group: object) -> bool:
        if self.num_removals > 0:
            self.num_removals -= 1
            self.group = object()
        return self.group is group

    def release(self) -> None:
        self.is_released = True


def make_config(lr: float = 1e-3) -> RunConfig:
    return validate({"run": "r", "model": {"path": "m"}, "learner": {"lr": lr}}, "test")


@pytest.fixture(autouse=True)
def kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "kill", lambda actor: setattr(actor, "is_dead", True))


def controller_of(cluster: Any) -> RoleGroup:
    return RoleGroup(cluster, timeout_s=10)


async def test_a_new_controller_adopts_the_ranks_and_the_old_one_is_fenced() -> None:
    cluster = FakeCluster()
    zombie, successor = controller_of(cluster), controller_of(cluster)
    await zombie.start()
    assert await successor.adopt()
    assert successor.actors == cluster.sets[1], "no rank was started again"
    with pytest.raises(Fenced, match="another learner has adopted policy rank 0"):
        await zombie.call_all("update")
    await successor.call_all("update")
    assert [actor.rank.calls for actor in cluster.sets[1]] == [["join", "load", "update"]] * NUM_RANKS


async def test_a_fenced_controller_does_not_end_the_ranks_of_its_successor() -> None:
    cluster = FakeCluster()
    zombie, successor = controller_of(cluster), controller_of(cluster)
    await zombie.start()
    await successor.adopt()
    await zombie.end()
    assert not cluster.is_released
    await successor.end()
    assert cluster.is_released


async def test_ranks_made_in_a_reservation_that_was_removed_meanwhile_are_made_again() -> None:
    cluster = FakeCluster()
    cluster.num_removals = 2
    role = controller_of(cluster)
    await role.start()
    assert list(cluster.find()) == [3] and role.actors == cluster.sets[3]


async def test_resources_that_ranks_of_an_earlier_learner_freed_are_reserved_again_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two roles share them. Ray would start nothing in a group that was removed, and not say so."""
    states = {"kept": "REMOVED"}
    made: list[str] = []

    def make(*_: object, name: str, **__: object) -> Any:
        made.append(name)
        states[f"new-{len(made)}"] = "CREATED"
        return SimpleNamespace(id=f"new-{len(made)}", wait=lambda _: True)

    def look_up(name: str) -> Any:
        if not made:
            raise ValueError(name)
        return SimpleNamespace(id=f"new-{len(made)}", wait=lambda _: True, bundle_specs=[])

    monkeypatch.setattr(role_group, "placement_group", make)
    monkeypatch.setattr(role_group, "get_placement_group", look_up)
    monkeypatch.setattr(role_group, "placement_group_table", lambda group: {"state": states[group.id]})
    config = validate({"run": "r", "model": {"path": "m"}, "learner": {"ray_address": "head:6379"}}, "test")
    reserved = Reservation(config, {"policy": config.learner.policy}, timeout_s=1)
    kept: Any = SimpleNamespace(id="kept")
    reserved.group = kept
    assert await asyncio.gather(reserved.holds(kept), reserved.holds(kept)) == [False, False]
    assert made == ["policy"] and await reserved.holds(reserved.group)


def test_a_controller_makes_the_actors_of_our_roles_without_their_models() -> None:
    """Their processes are named after the workers."""
    program = (
        "import sys\n"
        "from penstock.config.loading import validate\n"
        "from penstock_learner.roles.role_group import RankActor, actor_class\n"
        "own = {'step': 'steps.py:step', 'roles': {'judge': {'worker': 'reward_model', 'path': 'j'}}}\n"
        "learner = validate({'model': {'path': 'm'}, 'learner': own}, 'test').learner\n"
        "made = [actor_class(learner, name) for name in ('policy', 'reference', 'critic', 'judge')]\n"
        "assert all(issubclass(each, RankActor) for each in made)\n"
        "print(*(each.__name__ for each in made), *({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["PolicyWorker", "ReferenceWorker", "CriticWorker", "RewardModelWorker"], done.stderr


def test_the_actor_of_a_rank_passes_calls_on_to_its_worker() -> None:
    config = make_config()
    actor = actor_class(config.learner, "policy")(config, 1, NUM_RANKS, "controller", "policy")
    assert (type(actor.worker).__name__, actor.worker.rank) == ("PolicyWorker", 1)
    assert "update" in actor.call("controller", "declarations")
    actor.call("controller", "mark_up")
    assert actor.adopt("successor", config)
    with pytest.raises(Fenced, match="another learner has adopted policy rank 1"):
        actor.call("controller", "declarations")


def test_a_rank_that_cannot_start_is_not_restarted_and_its_reason_is_told() -> None:
    text = "The actor died because of an error raised in its creation task\nTraceback:\nImportError: no kernel"
    failed = RayActorError(error_msg=text, actor_init_failed=True)
    found = controller_of(FakeCluster())._explained("wait_idle", [RayActorError(), failed])
    assert isinstance(found, ProcessDied) and str(found).endswith("role could not start: ImportError: no kernel")


async def test_a_set_with_a_dead_rank_is_not_adopted() -> None:
    cluster = FakeCluster()
    await controller_of(cluster).start()
    cluster.sets[1][0].is_dead = True
    successor = controller_of(cluster)
    assert not await successor.adopt()
    assert cluster.sets[1][1].is_dead, "the other rank still holds its resources"
    await successor.start()
    assert successor.actors == cluster.sets[2]


async def test_a_rank_that_waits_for_one_that_is_idle_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller died between its calls to two ranks: one is idle, the other waits for it in a collective."""
    monkeypatch.setattr(role_group, "OTHERS_ADOPT_S", 0.01)
    cluster = FakeCluster()
    await controller_of(cluster).start()
    cluster.sets[1][0].adopt = SimpleNamespace(remote=lambda *_: asyncio.get_running_loop().create_future())
    successor = controller_of(cluster)
    async with asyncio.timeout(role_group.ADOPT_S / 2):
        assert not await successor.adopt()
    assert all(actor.is_dead for actor in cluster.sets[1])


async def test_the_processes_of_ranks_may_start_slower_than_a_call_may_take() -> None:
    """On a busy machine their imports take longer than a short `learner.rank_timeout_s`, at every restart again."""

    class SlowCluster(FakeCluster):
        def make(self, number: int, owner: str) -> list[FakeActor]:
            actors = super().make(number, owner)
            for actor in actors:
                first, call = asyncio.get_running_loop().create_future(), actor.call
                asyncio.get_running_loop().call_later(0.3, first.set_result, None)

                def options(first: Any = first, call: Any = call, **_: Any) -> Any:
                    return call.options() if first.done() else SimpleNamespace(remote=lambda *_: first)

                actor.call = SimpleNamespace(options=options)
            return actors

    role = RoleGroup(cast(Any, SlowCluster()), timeout_s=0.1)
    await role.start()
    assert role.is_up


async def test_ranks_of_another_config_are_not_adopted() -> None:
    cluster = FakeCluster()
    await controller_of(cluster).start()
    cluster.config = make_config(lr=1e-4)
    assert not await controller_of(cluster).adopt()
    assert not cluster.find()


async def test_ranks_that_have_not_loaded_are_not_adopted() -> None:
    cluster = FakeCluster()
    cluster.make(1, "dead-controller")
    successor = controller_of(cluster)
    assert not await successor.adopt()
    await successor.start()
    assert successor.actors == cluster.sets[2]


async def test_ranks_whose_controller_died_while_it_started_them_are_not_used() -> None:
    """They have joined a process group, and cannot join another one."""
    cluster = FakeCluster()
    killed = controller_of(cluster)
    killed.actors = await killed._make_set()
    await killed.call_all("join", await killed.call_rank(0, "rendezvous"))
    successor = controller_of(cluster)
    assert not await successor.adopt()
    await successor.start()
    assert [actor.rank.calls for actor in cluster.find()[2]] == [["join", "load"]] * NUM_RANKS


async def test_a_first_start_ends_the_ranks_that_an_earlier_controller_left() -> None:
    cluster = FakeCluster()
    await controller_of(cluster).start()
    successor = controller_of(cluster)
    await successor.start()
    assert all(actor.is_dead for actor in cluster.sets[1])
    assert successor.actors == cluster.sets[2]


async def test_the_ranks_of_a_controller_that_was_told_to_stop_wait_for_the_next_one() -> None:
    cluster = FakeCluster()
    stopped, successor = controller_of(cluster), controller_of(cluster)
    await stopped.start()
    before = cluster.sets[1][0].rank.beat_at
    await stopped.end(await_successor=True)
    assert not cluster.is_released
    assert cluster.sets[1][0].rank.beat_at < before, "they would wait as long as for a controller that has crashed"
    assert await successor.adopt()
    assert cluster.sets[1][0].rank.beat_at >= before


@pytest.mark.parametrize(
    ("error", "ends"), [(ProcessDied("policy.update failed: CUDA error"), True), (Unavailable("Redis"), False)]
)
async def test_ranks_that_fail_are_not_left_to_the_next_controller(error: Exception, ends: bool) -> None:
    """A rank with a broken CUDA context is alive and answers `adopt`. Every controller that adopts it would fail."""
    cluster = FakeCluster()
    role = controller_of(cluster)
    await role.start()

    async def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        await run_with_ranks(fail(), [role], asyncio.Event())
    assert cluster.is_released == ends


async def test_a_controller_that_was_replaced_ends_no_ranks_when_it_fails() -> None:
    cluster = FakeCluster()
    zombie, successor = controller_of(cluster), controller_of(cluster)
    await zombie.start()
    await successor.adopt()

    async def fail() -> None:
        raise ProcessDied("policy.update failed")

    with pytest.raises(ProcessDied):
        await run_with_ranks(fail(), [zombie], asyncio.Event())
    assert not cluster.is_released


@pytest.mark.parametrize("error", [ObjectLostError("0" * 56, None, "update"), NodeDiedError("its node")])
async def test_a_node_that_dies_with_the_answer_of_a_rank_has_killed_the_rank(error: Exception) -> None:
    role = controller_of(FakeCluster())
    await role.start()
    failed = asyncio.get_running_loop().create_future()
    failed.set_exception(error)
    with pytest.raises(RoleDied, match="a rank of the policy role died in update"):
        await role._gather("update", [failed], timeout_s=10)


def test_ranks_that_end_while_they_are_looked_up_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_actor(name: str) -> str:
        if name == "policy-0-1":
            raise ValueError("Failed to look up actor with name 'policy-0-1'")
        return name

    names = ["policy-0-1", "policy-0-2", "policy-1-2", "critic-0-1"]
    monkeypatch.setattr(role_group, "list_named_actors", lambda: names)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    config = validate({"run": "r", "model": {"path": "m"}, "learner": {"ray_address": "head:6379"}}, "test")
    found = RoleActors(config, "policy", config.learner.policy, cast(Any, None)).find()
    assert found == {2: ["policy-0-2", "policy-1-2"]}


async def test_the_error_of_a_rank_is_one_line() -> None:
    role = controller_of(FakeCluster())
    await role.start()
    failed = asyncio.get_running_loop().create_future()
    failed.set_exception(RuntimeError("CUDA error: device-side assert\nCUDA kernel errors might be reported later"))
    with pytest.raises(ProcessDied) as raised:
        await role._gather("update", [failed], timeout_s=10)
    assert (
        str(raised.value) == "policy.update failed: RuntimeError: CUDA error: device-side assert (see the rank's log)"
    )
