"""A learner loads the checkpoint that it has chosen, unless a newer one was finished since; it takes no term when it is
to stop."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from prometheus_client import CollectorRegistry

from penstock.config.algorithms import KLConfig
from penstock.config.learner import CheckpointConfig
from penstock.config.loading import validate
from penstock.config.service import ReplayConfig
from penstock.errors import CheckpointDamaged, ConfigError, Fenced, RoleDied, Unavailable
from penstock_learner import checkpoints as checkpoints_module
from penstock_learner.checkpoints import TRAINER_FILE, CheckpointStore, find_damage, tokenizer_digest
from penstock_learner.loop import process as controller_module
from penstock_learner.loop import take_over as take_over_module
from penstock_learner.loop.process import LearnerController
from penstock_learner.loop.take_over import choose_checkpoint, take_over
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.term import TrainerState
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore


class Loaded(Exception):
    """Ends a test's learner when its policy loads the checkpoint in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder


class OnePolicy:
    """A role without ranks."""

    name, num_ranks, is_up = "policy", 1, True

    async def start(self) -> None: ...

    async def adopt(self) -> bool:
        return False

    async def call_all(self, method: str, folder: Path) -> None:
        assert method == "load_checkpoint"
        raise Loaded(folder)

    async def call_rank(self, rank: int, method: str, *arguments: Any) -> Any:
        if method == "prefix_sharing_roles":
            return frozenset({"policy"})
        assert method == "find_damage"
        return find_damage(*arguments)


class ContendedQueue(MemoryReplayQueue):
    """The queue of a learner that starts while another one trains. That one finishes `late_step` just before it is
    fenced, and also commits it if `commits`."""

    controller: LearnerController
    late_step = 0
    commits = True

    async def take_term(self, at_least: int) -> int:
        if self.late_step:
            save(self.controller, self.late_step)
            if self.commits:
                before = MemoryReplayQueue(self.store, self.config)
                await before.take_term(0)
                await before.commit(self.late_step, [])
        return await super().take_term(at_least)


def save(controller: LearnerController, step: int, term: int = 1, store_id: str = "") -> Path:
    state = TrainerState(step, step, term, store_id=store_id)
    return controller.checkpoints.finish(controller.checkpoints.partial_folder(step, term), state)


class SilentRedis:
    """Accepts the phases of the start."""

    async def evalsha(self, *_: object) -> int:
        return 1


@pytest.fixture
def controller(tmp_path: Path) -> LearnerController:
    config = validate({"run": "test", "run_dir": str(tmp_path), "model": {"path": str(tmp_path)}}, "test")
    queue = ContendedQueue(MemoryStore(), config.replay)
    fleet: Any = SimpleNamespace(client=SilentRedis())
    roles: Any = {"policy": OnePolicy()}
    metrics = LearnerMetrics(CollectorRegistry(), "standalone")
    queue.controller = LearnerController(config, queue, fleet, roles, metrics)
    return queue.controller


def contended(controller: LearnerController) -> ContendedQueue:
    assert isinstance(controller.queue, ContendedQueue)
    return controller.queue


@pytest.mark.fault_row(
    "learner", "take-over race", how="the first learner commits a checkpoint while the second starts",
    must="the second takes its term first and does not miss the checkpoint",
)  # fmt: skip
async def test_a_checkpoint_that_the_learner_before_finished_at_the_last_moment_is_not_missed(
    controller: LearnerController, caplog: pytest.LogCaptureFixture
) -> None:
    save(controller, 480)
    contended(controller).late_step = 485
    with caplog.at_level("INFO"), pytest.raises(Loaded) as stopped:
        await controller.run()
    assert stopped.value.folder.name == "term-000001-step-00000485"
    assert contended(controller).term == 2
    assert "has changed since the checkpoint was chosen; choosing again" in caplog.text


@pytest.mark.parametrize("newest", [480, 485])
async def test_the_checkpoint_is_chosen_once_unless_one_was_finished_since(
    controller: LearnerController, newest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner before was fenced before it could commit its last one. Its successor would prefer that one again."""
    save(controller, 480)
    queue = contended(controller)
    queue.late_step, queue.commits = 0 if newest == 480 else newest, False
    read: list[str] = []

    def read_state(path: Path) -> TrainerState:
        read.append(path.name)
        return checkpoints_module.read_state(path)

    monkeypatch.setattr(take_over_module, "read_state", read_state)
    with pytest.raises(Loaded) as stopped:
        await controller.run()
    names = [f"term-000001-step-{step:08d}" for step in sorted({480, newest})]
    assert stopped.value.folder.name == names[-1] and read == names


async def test_a_learner_that_continues_shows_its_step_before_it_makes_another(
    controller: LearnerController, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(controller, 480)
    monkeypatch.setattr(OnePolicy, "call_all", AsyncMock())
    monkeypatch.setattr(controller.training, "share_prefixes", Mock(side_effect=Loaded(Path())))
    with pytest.raises(Loaded):
        await controller.run()
    assert controller.metrics.registry.get_sample_value("penstock_learner_step") == 480


async def test_a_damaged_checkpoint_is_not_read_again_if_nothing_was_finished_since(
    controller: LearnerController, caplog: pytest.LogCaptureFixture
) -> None:
    save(controller, 480)
    (save(controller, 485) / TRAINER_FILE).unlink()
    with pytest.raises(Loaded) as stopped:
        await controller.run()
    assert stopped.value.folder.name == "term-000001-step-00000480"
    assert caplog.text.count("term-000001-step-00000485 cannot be used") == 1


async def test_a_learner_whose_choice_a_commit_has_outdated_fences_no_one(controller: LearnerController) -> None:
    """It is refused before it takes a term."""
    target = save(controller, 480)
    queue, config = contended(controller), CheckpointConfig(resume=str(target))
    chosen = await choose_checkpoint(queue, controller.checkpoints, config)
    before = MemoryReplayQueue(queue.store, queue.config)
    await before.take_term(0)
    await before.commit(485, [1])
    with pytest.raises(ConfigError, match="step 485 is committed"):
        await take_over(queue, controller.checkpoints, config, chosen, no_load, 0, KLConfig())
    assert queue.store.counters["term"] == before.term


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_redis_that_loses_its_data_while_the_roles_start_is_refused(
    controller: LearnerController, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new prompts would have ids of the ledger, and would never be trained. Nothing is committed in either."""
    queue, config = contended(controller), CheckpointConfig()
    queue.store.counters["next_prompt_id"] = 40
    state = TrainerState(5, 5, 1, [(1, 40)], store_id=await queue.store_id())
    controller.checkpoints.finish(controller.checkpoints.partial_folder(5, 1), state)
    chosen = await choose_checkpoint(queue, controller.checkpoints, config)

    async def take_term(at_least: int) -> int:
        queue.store = MemoryStore()
        return await MemoryReplayQueue.take_term(queue, at_least)

    if is_late:
        monkeypatch.setattr(queue, "take_term", take_term)
    else:
        queue.store = MemoryStore()
    with pytest.raises(ConfigError, match="this Redis is not the one .*, or it has lost its data"):
        await take_over(queue, controller.checkpoints, config, chosen, no_load, 0, KLConfig())
    assert (queue.store.counters["term"] > 0) == is_late


async def test_a_checkpoint_that_is_damaged_when_it_is_loaded_is_replaced_by_the_one_before(
    controller: LearnerController,
) -> None:
    older, newer = save(controller, 480), save(controller, 485)
    loaded: list[Path] = []

    async def load(path: Path) -> None:
        if path == newer:
            raise CheckpointDamaged("a shard is truncated")
        loaded.append(path)

    queue, config = contended(controller), CheckpointConfig()
    chosen = await choose_checkpoint(queue, controller.checkpoints, config)
    term = await take_over(queue, controller.checkpoints, config, chosen, load, 0, KLConfig())
    assert loaded == [older] and term.step == 480
    shutil.rmtree(older)
    with pytest.raises(CheckpointDamaged, match=r"no checkpoint is intact: .*485 \(a shard is truncated\); restore"):
        await take_over(
            queue, controller.checkpoints, config, await choose_checkpoint(queue, controller.checkpoints, config),
            load, 0, KLConfig(),
        )  # fmt: skip


async def test_a_first_start_does_not_speak_of_a_checkpoint(
    controller: LearnerController, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[str] = []

    async def enter(_: str, phase: str) -> None:
        phases.append(phase)

    monkeypatch.setattr(controller.phases, "enter", enter)
    monkeypatch.setattr(controller, "_make_step_loop", end_at_once)
    with pytest.raises(Loaded):
        await controller.run()
    save(controller, 480)
    with pytest.raises(Loaded):
        await controller.run()
    [first, again] = [phase for phase in phases if phase.startswith("taking over")]
    assert first == "taking over the run" and again == f"{first} and loading term-000001-step-00000480"


def end_at_once(*_: object) -> None:
    raise Loaded(Path())


async def test_a_new_term_is_above_those_of_all_checkpoints(controller: LearnerController) -> None:
    """Redis may have lost its newest terms. A checkpoint of an older term would not count as the newest."""
    save(controller, 480, term=7)
    with pytest.raises(Loaded):
        await controller.run()
    assert contended(controller).term == 8


async def test_a_rank_says_which_roles_share_prefixes(
    controller: LearnerController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller does not load the models' configurations, for which it would import transformers."""
    shared: list[frozenset[str]] = []

    def end(*_: object) -> None:
        shared.append(controller.training.access.prefix_sharing)
        raise Loaded(Path())

    monkeypatch.setattr(controller, "_make_step_loop", end)
    with pytest.raises(Loaded):
        await controller.run()
    assert shared == [{"policy"}]


@pytest.mark.fault_row(
    "learner", "told to stop while it starts", how="the stop comes before the term", must="it takes no term"
)
async def test_a_learner_that_is_to_stop_takes_no_term(controller: LearnerController) -> None:
    controller.stopping.set()
    await controller.run()
    assert (await controller.queue.stat()).term == 0


async def test_a_learner_that_finds_a_rank_dead_after_it_was_replaced_does_not_take_the_run_back(
    controller: LearnerController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended learner wakes up past the deadline of a call to its ranks, and takes them for dead."""
    successor = MemoryReplayQueue(contended(controller).store, controller.config.replay)

    async def wake_up(queue: MemoryReplayQueue, *_: object) -> None:
        await queue.take_term(0)
        await successor.take_term(0)
        raise RoleDied("policy", "policy.update did not finish in 15 s")

    monkeypatch.setattr(controller_module, "take_over", wake_up)
    with pytest.raises(Fenced, match="another learner has taken over"):
        await controller.run()
    assert (await successor.stat()).term == successor.term


async def test_a_learner_with_the_checkpoint_of_another_store_fences_no_one(controller: LearnerController) -> None:
    save(controller, 480, store_id="another")
    with pytest.raises(ConfigError, match="not the one that the checkpoint was written with"):
        await controller.run()
    assert (await controller.queue.stat()).term == 0


@pytest.mark.fault_row(
    "checkpoints", "an older checkpoint is started", how="the newest checkpoint is gone or not named",
    must="it is refused, with both steps; nothing changes",
)  # fmt: skip
async def test_a_checkpoint_from_before_the_newest_commit_is_refused_with_both_numbers(
    controller: LearnerController,
) -> None:
    save(controller, 480)
    queue = contended(controller)
    await queue.take_term(0)
    await queue.commit(485, [1, 2, 3])
    with pytest.raises(
        ConfigError, match=r"step-00000480 is at step 480, but step 485 is committed; 3 groups .*rewind"
    ):
        await controller.run()
    assert queue.term == 1, "a learner that is refused fences nobody"


async def test_a_run_without_its_checkpoints_is_refused(controller: LearnerController) -> None:
    queue = contended(controller)
    await queue.take_term(0)
    await queue.commit(485, [1])
    with pytest.raises(ConfigError, match=r"the model folder is at step 0, but step 485 is committed"):
        await controller.run()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_nothing_is_trained_while_redis_may_lose_that_the_run_was_rewound(
    controller: LearnerController, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the groups that were abandoned would be missing in the weights, and no one would make them again."""
    target = save(controller, 480)
    queue = contended(controller)
    await queue.submit([b"p"] * 2, [0] * 2, "")
    await queue.take_term(0)
    await queue.commit(485, [1, 2])

    async def load(_: Path) -> None: ...

    async def rewind(*words: Any) -> None:
        await ContendedQueue.rewind(queue, *words)
        if is_lost:
            asyncio.get_running_loop().call_soon(setattr, queue.store, "rewind", None)

    monkeypatch.setattr(queue, "rewind", rewind)
    config = controller.config.learner.checkpoint.model_copy(update={"resume": str(target), "rewind": True})
    chosen = await choose_checkpoint(queue, controller.checkpoints, config)
    taking = take_over(queue, controller.checkpoints, config, chosen, load, 0.05, KLConfig())
    if is_lost:
        with pytest.raises(Unavailable, match="lost the rewind of the run; start the learner again"):
            await taking
        return
    assert (await taking).cause == "order"
    assert controller.checkpoints.rewind == queue.store.rewind is not None


def test_a_rewind_needs_the_name_of_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match="rewind needs resume to be the path"):
        validate({"run": "test", "model": {"path": "m"}, "learner": {"checkpoint": {"rewind": True}}}, "test")


@pytest.mark.parametrize(("policy", "outcome"), [("wait", "dropped and made again"), ("correct", "trained with off-")])
async def test_a_learner_says_that_groups_wait_which_were_admitted_for_larger_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str, outcome: str
) -> None:
    store = MemoryStore()
    first, second = (
        MemoryReplayQueue(store, ReplayConfig(groups_per_step=size, max_staleness=1, stale_policy=policy))  # type: ignore[arg-type]
        for size in (8, 4)
    )
    await first.submit([b"p"] * 40, [0] * 40, "")
    assert len(await first.lease("s", 40)) == 16
    checkpoints, config = CheckpointStore(tmp_path, 1), CheckpointConfig()
    for queue, num_overdue in ((first, 0), (second, 8)):
        chosen = await choose_checkpoint(queue, checkpoints, config)
        term = await take_over(queue, checkpoints, config, chosen, no_load, 0, KLConfig())
        assert term.num_overdue == num_overdue
    [line] = [record.getMessage() for record in caplog.records if "groups wait" in record.getMessage()]
    assert line.startswith("16 groups wait, 8 more than replay.groups_per_step 4 can train within") and outcome in line


async def no_load(_: Path) -> None: ...


async def test_another_tokenizer_than_that_of_the_checkpoint_is_refused(controller: LearnerController) -> None:
    """A chat template is not part of it."""
    folder = controller.config.model.path
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    controller.checkpoints.tokenizer = tokenizer_digest(folder)
    save(controller, 480)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(Loaded):
        await controller.run()
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1, "b": 0}}}')
    with pytest.raises(ConfigError, match=r"tokenizer in model\.path is not the one .*; restore its files, or start a"):
        await controller.run()
