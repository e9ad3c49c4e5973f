"""The ledger, and how a checkpoint stores it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CheckpointDamaged, ConfigError, Fenced
from penstock_learner.checkpoints import CheckpointStore, read_state
from penstock_learner.term import Ledger, TrainerState


@given(st.lists(st.sets(st.integers(1, 60), min_size=1), max_size=8))
def test_ledger_is_a_set_of_prompt_ids(additions: list[set[int]]) -> None:
    ledger, expected = Ledger(), set[int]()
    for ids in additions:
        fresh = ids - expected
        ledger.add(fresh)
        expected |= fresh
        assert len(ledger) == len(expected)
    assert {i for i in range(70) if i in ledger} == expected
    assert Ledger(ledger.ranges).ranges == ledger.ranges
    assert all(a[1] + 1 < b[0] for a, b in zip(ledger.ranges, ledger.ranges[1:], strict=False))


def test_training_a_prompt_twice_is_refused() -> None:
    ledger = Ledger([(1, 5)])
    with pytest.raises(AssertionError, match="trained twice"):
        ledger.add([5])


def save(store: CheckpointStore, step: int, term: int = 1) -> None:
    state = TrainerState(step=step, policy_version=step, term=term, ledger=[(1, step)])
    store.finish(store.partial_folder(step, term), state)


def test_newest_finished_checkpoint_counts_and_old_ones_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        save(store, step)
    (store.partial_folder(11, 1) / "shard").write_text("torn by a crash")
    newest = read_state(store.newest_first()[0])
    assert newest == TrainerState(step=10, policy_version=10, term=1, ledger=[(1, 10)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "term-000001-step-00000002", "term-000001-step-00000010", "term-000001-step-00000011.partial",
    ]  # fmt: skip


def test_the_next_checkpoint_removes_what_a_crash_left(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.partial_folder(4, 1)
    save(store, 2, term=2)
    assert [path.name for path in tmp_path.iterdir()] == ["term-000002-step-00000002"]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    (tmp_path / "term-000001-step-00000001" / "trainer.json").write_text("{")
    with pytest.raises(CheckpointDamaged, match=r"step-00000001/trainer.json is damaged"):
        read_state(store.newest_first()[0])


def test_a_fenced_learner_cannot_overtake_its_successor(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 10, term=1)
    save(store, 12, term=2)
    save(store, 14, term=1)
    newest = read_state(store.newest_first()[0])
    assert (newest.term, newest.step) == (2, 12)


def test_a_learner_whose_checkpoint_the_successor_removed_is_fenced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    partial = store.partial_folder(4, 1)
    save(store, 2, term=2)
    with pytest.raises(Fenced, match="another learner has taken over"):
        store.finish(partial, TrainerState(step=4, term=1))


def test_a_checkpoint_refuses_another_store() -> None:
    TrainerState().check_store("any")
    TrainerState(store_id="mine").check_store("mine")
    with pytest.raises(ConfigError, match="this Redis is not the one that the checkpoint was written with"):
        TrainerState(store_id="mine").check_store("other")
