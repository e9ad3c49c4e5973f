"""The store of offline answers writes whole parts, keeps the order of the dataset, and refuses other settings."""

from __future__ import annotations

import argparse
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.errors import InvalidInput, Unavailable
from penstock.trajectory import Prompt
from penstock_tools.offline import answer_store
from penstock_tools.offline.answer_store import PART_ROWS, AnswerRow, AnswerStore, json_column, prompt_columns
from penstock_tools.offline.shard import Shard, parse_shard

TIMEOUT_S = 60.0
SETTINGS = {"model": "/a/model", "sampling": "n 2"}


def answer(row: int) -> AnswerRow:
    ids = [np.array([row, 1], dtype=np.int32), np.array([row], dtype=np.int32)]
    return AnswerRow(
        row, [f"{row}", f"{row}!"], ids, [np.zeros(len(i), np.float32) for i in ids],
        [np.ones(len(i), np.uint8) for i in ids], ["stop", "length"], rewards=[1.0, 0.0],
    )  # fmt: skip


def prompts(count: int) -> list[Prompt]:
    return [Prompt(messages=(("user", f"{i}?"),), data_source="test", ground_truth=f"{i}") for i in range(count)]


def add_all(store: AnswerStore, rows: list[int]) -> None:
    for row in rows:
        store.add(answer(row))
        if store.is_part_due:
            store.write_part()


def test_rows_become_one_file_in_order_whatever_order_they_finish_in(tmp_path: Path) -> None:
    count = 5 * PART_ROWS + 3
    order = np.random.default_rng(0).permutation(count).tolist()
    output = tmp_path / "a.parquet"
    with AnswerStore(output, SETTINGS) as store:
        add_all(store, order[: count // 2])
        assert len(list(store.folder.glob("part-*"))) >= count // 2 // PART_ROWS
    with AnswerStore(output, SETTINGS) as store:
        assert store.rows == set(order[: count // 2])
        add_all(store, order[count // 2 :])
        store.finish(prompts(count))
    rows = parquet.read_table(output).to_pylist()
    assert [row["row"] for row in rows] == list(range(count))
    assert rows[7]["responses"] == ["7", "7!"] and rows[7]["token_ids"] == [[7, 1], [7]]
    assert rows[7]["prompt"] == [{"role": "user", "content": "7?"}]
    assert rows[7]["reward_model"] == {"ground_truth": "7"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"], "nothing else is left"
    with AnswerStore(output, SETTINGS) as store:
        assert store.finished and len(store.rows) == count
        assert (store.totals.num_samples, store.totals.num_tokens) == (2 * count, 3 * count)
        assert (store.totals.reward_sum, store.totals.num_rewards) == (count, 2 * count)


def test_rows_that_are_added_while_a_part_is_written_are_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, may_write = threading.Event(), threading.Event()
    write_table = parquet.write_table

    def write_slowly(*args: Any, **kwargs: Any) -> None:
        writing.set()
        assert may_write.wait(TIMEOUT_S)
        write_table(*args, **kwargs)

    monkeypatch.setattr(parquet, "write_table", write_slowly)
    with AnswerStore(tmp_path / "a.parquet", SETTINGS) as store:
        for row in range(PART_ROWS):
            store.add(answer(row))
        assert store.is_part_due
        writer = threading.Thread(target=store.write_part)
        writer.start()
        assert writing.wait(TIMEOUT_S)
        store.add(answer(PART_ROWS))
        assert not store.is_part_due, "one part is written at a time"
        may_write.set()
        writer.join(TIMEOUT_S)
        store.write_part()
        parts = sorted(store.folder.glob("part-*"))
        assert [parquet.read_metadata(part).num_rows for part in parts] == [PART_ROWS, 1]


@pytest.mark.parametrize("finished", [True, False])
def test_answers_of_other_settings_are_not_mixed_in(tmp_path: Path, finished: bool) -> None:
    output = tmp_path / "a.parquet"
    with AnswerStore(output, SETTINGS) as store:
        store.add(answer(0))
        if finished:
            store.finish(prompts(1))
    with pytest.raises(InvalidInput, match="holds answers with sampling 'n 2', not 'n 4'; remove it"):
        AnswerStore(output, SETTINGS | {"sampling": "n 4"}).__enter__()
    with AnswerStore(output, SETTINGS) as store:
        assert store.rows == {0}


def test_two_processes_cannot_write_one_file(tmp_path: Path) -> None:
    with (
        AnswerStore(tmp_path / "a.parquet", SETTINGS),
        pytest.raises(InvalidInput, match="is being written by another process"),
    ):
        AnswerStore(tmp_path / "a.parquet", SETTINGS).__enter__()
    with AnswerStore(tmp_path / "a.parquet", SETTINGS):
        pass


def test_shards_that_run_at_once_make_the_file_of_one_process(tmp_path: Path) -> None:
    count = 2 * PART_ROWS + 5
    with AnswerStore(tmp_path / "one.parquet", SETTINGS) as store:
        add_all(store, list(range(count)))
        store.finish(prompts(count))
    output = tmp_path / "a.parquet"
    with (
        AnswerStore(output, SETTINGS, Shard(0, 2)) as first,
        AnswerStore(output, SETTINGS, Shard(1, 2)) as second,
    ):
        add_all(second, list(second.shard.rows(count)))
        second.finish(prompts(count))
        assert not second.finished and len(second.rows) == count // 2
        add_all(first, list(first.shard.rows(count)))
        first.finish(prompts(count))
        assert first.finished and len(first.rows) == count
        assert (first.written.num_tokens, first.totals.num_tokens) == (3 * (count - count // 2), 3 * count)
    assert parquet.read_table(output) == parquet.read_table(tmp_path / "one.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "one.parquet"]


def test_shards_that_end_at_once_write_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merges, merge = [], AnswerStore._merge
    monkeypatch.setattr(AnswerStore, "_merge", lambda store, rows: (merges.append(store), merge(store, rows)))
    count, output = 30, tmp_path / "a.parquet"
    stores = [AnswerStore(output, SETTINGS, Shard(index, 3)) for index in range(3)]
    with stores[0], stores[1], stores[2]:
        for store in stores:
            add_all(store, list(store.shard.rows(count)))
            store.write_part()
        threads = [threading.Thread(target=store.finish, args=(prompts(count),)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert len(merges) == 1 and all(store.finished and len(store.rows) == count for store in stores)
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_ended_shards_continue_with_their_number_and_another(tmp_path: Path) -> None:
    """What a killed shard leaves: parts, a part that was not finished, and the files of its locks."""
    count, output = 20, tmp_path / "a.parquet"
    with AnswerStore(output, SETTINGS, Shard(0, 2)) as store:
        add_all(store, [0, 2])
    (store.folder / "part-0-of-2-000001.parquet.partial").write_text("half")
    with AnswerStore(output, SETTINGS, Shard(0, 2)) as store:
        assert store.rows == {0, 2}
        store.add(answer(4))
    with AnswerStore(output, SETTINGS, Shard(2, 3)) as store:
        assert store.rows == {0, 2, 4}
        add_all(store, [row for row in store.shard.rows(count) if row not in store.rows])
    with AnswerStore(output, SETTINGS) as store:
        assert store.rows == {0, 2, 4, *range(2, count, 3)}
        add_all(store, [row for row in range(count) if row not in store.rows])
        store.finish(prompts(count))
    assert parquet.read_table(output)["row"].to_pylist() == list(range(count))


def test_rows_that_another_process_answers_are_refused(tmp_path: Path) -> None:
    output = tmp_path / "a.parquet"
    with AnswerStore(output, SETTINGS, Shard(1, 2)) as store:
        for shard, why in (
            (Shard(1, 2), r"is being written by another process \(--shard 1/2\); wait for it$"),
            (Shard(0, 1), r"another process \(--shard 1/2\); wait for it, or divide the rows as it does"),
            (Shard(0, 3), r"another process \(--shard 1/2\); wait for it, or divide the rows as it does"),
        ):
            with pytest.raises(InvalidInput, match=why):
                AnswerStore(output, SETTINGS, shard).__enter__()
        add_all(store, [1, 3])
    [part] = store.folder.glob("part-*")
    shutil.copy(part, store.folder / "part-copied-000000.parquet")
    with pytest.raises(InvalidInput, match="holds row 1, which another part holds too; remove one of them"):
        AnswerStore(output, SETTINGS).__enter__()


def test_a_lock_that_is_never_free_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_store, "LOCK_S", 0)
    with (
        AnswerStore(tmp_path / "a.parquet", SETTINGS) as store,
        store._locked(),
        pytest.raises(Unavailable, match="is being read or merged by another process"),
    ):
        store.finish(prompts(1))


@pytest.mark.parametrize("text", ["4/4", "1/0", "2", "-1/2", "a/b", "1/2/3"])
def test_shards_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not I/N with I from 0 to N - 1"):
        parse_shard(text)


def test_a_shard_is_split_into_shards() -> None:
    parts = [parse_shard("1/3").split(index, 4) for index in range(4)]
    assert sorted(row for part in parts for row in part.rows(50)) == list(Shard(1, 3).rows(50))
    assert str(parts[2]) == "7/12"


def test_outputs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.parquet").write_text("mine")
    (tmp_path / "plain").write_text("")
    for name, why in (
        ("nowhere/a.parquet", "there is no folder"),
        ("a.jsonl", "is not the name of a Parquet file"),
        ("other.parquet", "exists and is not a file of answers"),
        ("plain/a.parquet", "there is no folder"),
    ):
        with pytest.raises(InvalidInput, match=why):
            AnswerStore(tmp_path / name, SETTINGS).__enter__()
    assert (tmp_path / "other.parquet").read_text() == "mine"


def test_a_failed_row_says_why(tmp_path: Path) -> None:
    with AnswerStore(tmp_path / "a.parquet", SETTINGS) as store:
        store.add(AnswerRow(0, error="too long"))
        store.add(answer(1))
        store.finish(prompts(2))
        assert (store.totals.num_failed, store.totals.num_samples) == (1, 2)
    failed, fine = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert failed["error"] == "too long" and failed["responses"] == [] and failed["rewards"] is None
    assert fine["error"] is None


@pytest.mark.parametrize(
    ("values", "back"),
    [
        (["1", None], ["1", None]),
        ([1, 2.5], [1.0, 2.5]),
        ([1, "a", None], ["1", "a", None]),
        ([{"a": 1}, {"b": "x"}, None], [{"a": 1, "b": None}, {"a": None, "b": "x"}, None]),
        ([{"a": 1}, {"a": "x"}], [{"a": "1"}, {"a": "x"}]),
        ([{}, {}], [None, None]),
        ([{"a": {}}, {"a": {"b": [1]}}], [{"a": {"b": None}}, {"a": {"b": [1]}}]),
        ([[{"a": {}}], [{}]], ['[{"a": {}}]', "[{}]"]),
        ([2**70, 1], [str(2**70), "1"]),
        ([[1, "a"], [2]], ['[1, "a"]', "[2]"]),
    ],
)
def test_any_json_fits_a_column(values: list[Any], back: list[Any], tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": json_column(values)}), tmp_path / "x.parquet")
    assert parquet.read_table(tmp_path / "x.parquet")["x"].to_pylist() == back


def test_tool_calls_of_a_prompt_are_written_too() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    prompt = Prompt(messages=(("user", "2+2?"), ("assistant", "")), message_fields={1: {"tool_calls": [call]}})
    [row] = prompt_columns([prompt])["prompt"].to_pylist()
    assert row[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
