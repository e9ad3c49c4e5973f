"""`penstock queue export` and `import` on a real Redis, and a learner that trains an imported queue."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import main as cli
from penstock.codec import decode_prompt
from penstock.config.loading import dump_config
from penstock.config.service import ReplayConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import OfferedGroup, Origin
from penstock.trajectory import Prompt, Trajectory, VersionSegment
from penstock_tools.recordings.recording import ORIGIN, _import_key
from support.groups import make_group
from support.learner_runs import NUM_STEPS, fill_queue, make_config, outcome, run_learner
from support.queue_tools import Tools, content, operator_tools, recording_file, rich_group  # noqa: F401 the fixtures
from support.redis_server import RedisProcess
from support.tiny_models import make_tiny_qwen2

TIGHT = ReplayConfig(groups_per_step=1, max_staleness=0)


def test_a_recording_brings_back_every_field(tools: Tools, recording: Path) -> None:
    prompt = Prompt(messages=(("user", "2 + 2 = ?"),), ground_truth=4, priority=3, num_samples=4)
    tools.fill([rich_group(i) for i in range(200)], prompt)
    before = tools.stat()
    assert "exported 200 groups" in tools("export", str(recording))
    assert tools.stat() == before
    other = f"{tools.run}-replayed"
    assert "imported 200 groups" in tools("import", str(recording), run=other)
    assert tools.stat(other).admitted == tools.stat(other).queued == 200
    status = tools.on(lambda queue: queue.get_prompt(1), run=other)
    assert decode_prompt(status.payload) == prompt
    replayed = tools.taken(other, 200)
    assert [content(group) for group in replayed] == [content(group) for group in tools.taken(tools.run, 200)]
    assert [(group.run, group.prompt_id, group.attempt) for group in replayed] == [
        (other, i + 1, 1) for i in range(200)
    ]
    assert not recording.with_name(f"{recording.name}.partial").exists()


def test_export_all_begins_with_what_the_learner_holds(tools: Tools, recording: Path) -> None:
    groups = [rich_group(i) for i in range(6)]
    tools.fill(groups)
    tools.deliver(2)
    tools("export", str(recording))
    tools("import", str(recording), run=f"{tools.run}-ready")
    tools("export", str(recording), "--all", "--force")
    tools("import", str(recording), run=f"{tools.run}-all")
    assert [g.server_id for g in tools.taken(f"{tools.run}-ready", 9)] == [g.server_id for g in groups[2:]]
    assert [g.server_id for g in tools.taken(f"{tools.run}-all", 9)] == [g.server_id for g in groups]


def test_import_is_idempotent_and_goes_past_admission(tools: Tools, recording: Path) -> None:
    tools.fill([make_group(i) for i in range(100)])
    tools("export", str(recording))
    other = f"{tools.run}-again"
    assert "imported 100 groups" in tools("import", str(recording), run=other)
    assert "imported 0 groups" in tools("import", str(recording), run=other)
    assert tools.stat(other).queued == 100
    assert tools.on(lambda queue: queue.lease("rollout-0", 5), TIGHT, run=other) == []
    assert "imported 100 groups" in tools("import", str(recording), "--epoch", "1", run=other)
    assert tools.stat(other).admitted == tools.stat(other).queued == 200


def test_an_interrupted_import_goes_on(tools: Tools, recording: Path) -> None:
    """The import died after it had leased the first rows. Since then one lease has run out and one was given back."""
    tools.fill([make_group(i) for i in range(10)])
    tools("export", str(recording))
    other = f"{tools.run}-resumed"

    async def die(queue: RedisReplayQueue) -> None:
        offered = [OfferedGroup(row, b"", 0, make_group(row)) for row in range(3)]
        leases = await queue._lease_offered(offered, Origin(ORIGIN, _import_key(recording, 0)))
        await queue.give_back(ORIGIN, leases[0])

    tools.on(die, run=other)
    assert (tools.stat(other).admitted, tools.stat(other).in_flight) == (3, 3)
    assert "imported 10 groups" in tools("import", str(recording), run=other)
    stat = tools.stat(other)
    assert (stat.admitted, stat.queued, stat.in_flight, stat.pending_prompts) == (10, 10, 0, 0)
    original, resumed = tools.taken(tools.run, 10), tools.taken(other, 10)
    assert [content(group) for group in resumed] == [content(group) for group in original]


def test_what_was_trained_is_not_imported_again(tools: Tools, recording: Path) -> None:
    tools.fill([make_group(i) for i in range(4)])
    tools("export", str(recording), "--all")

    async def train(queue: RedisReplayQueue) -> None:
        await queue.take_term(0)
        await queue.commit(1, await queue.take(1, 2))

    other = f"{tools.run}-trained"
    tools("import", str(recording), run=other)
    tools.on(train, run=other)
    assert "imported 0 groups" in tools("import", str(recording), run=other)
    assert (tools.stat(other).trained, tools.stat(other).queued) == (2, 2)


def test_import_waits_for_room_and_says_what_to_do(tools: Tools, recording: Path, tmp_path: Path) -> None:
    big = 150_000
    random = np.random.default_rng(0)
    template = make_group(0)
    groups = []
    for _ in range(4):
        trajectory = Trajectory(
            token_ids=random.integers(0, 2**31, big).astype(np.int32),
            loss_mask=np.ones(big, dtype=np.uint8),
            log_probs=-random.exponential(1.0, big).astype(np.float32),
            segments=(VersionSegment(0, big, 0),),
            reward=0.0,
        )
        groups.append(replace(template, trajectories=(trajectory,)))
    tools.fill(groups)
    tools("export", str(recording))
    config = make_config(tmp_path, tmp_path, tools.url, f"{tools.run}-full")
    config = config.model_copy(update={"replay": config.replay.model_copy(update={"capacity_bytes": 2**20})})
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    words = ["queue", "import", str(recording), "--config", str(path), "--wait-s", "0.3"]
    for _ in range(3):
        assert cli.main(words) == 1
        assert "then import again: it goes on from here" in tools.capsys.readouterr().err
        tools.stat(config.run)
        assert len(tools.taken(config.run, 1)) == 1
    assert cli.main(words) == 0
    assert "imported 1 groups" in tools.capsys.readouterr().out
    assert tools.stat(config.run).queued == 4


def test_a_file_that_is_not_a_recording_is_refused(tools: Tools, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    missing, text, foreign = tmp_path / "missing.parquet", tmp_path / "text.parquet", tmp_path / "foreign.parquet"
    text.write_text("no Parquet")
    parquet.write_table(pa.table({"run": ["a"]}), foreign)
    assert "cannot be read" in tools("import", str(missing), code=2)
    assert "cannot be read as Parquet" in tools("import", str(text), code=2)
    assert "has no column `prompt_id`" in tools("import", str(foreign), code=2)


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ("server_id", "has nulls"),
        ("finished_at_ms", "is string, not int64"),
        ("trajectories", "row 0: the group has no trajectories"),
    ],
)
def test_a_recording_that_was_edited_incorrectly_is_refused(
    tools: Tools, recording: Path, column: str, problem: str
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    tools.fill([make_group(0), make_group(1)])
    tools("export", str(recording))
    table = parquet.read_table(recording)
    kind = pa.string() if column == "finished_at_ms" else table.schema.field(column).type
    value: Any = [] if column == "trajectories" else None
    edited = pa.array([value, value], kind)
    parquet.write_table(table.set_column(table.schema.get_field_index(column), column, edited), recording)
    assert problem in tools("import", str(recording), run=f"{tools.run}-edited", code=2)


@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_a_recording_without_its_sampling_is_refused_by_name(tools: Tools, recording: Path, field: str) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    tools.fill([make_group(0), make_group(1)])
    tools("export", str(recording))
    table = parquet.read_table(recording)
    column = table.schema.field("sampling")
    edited = pa.array([row | {field: None} for row in table["sampling"].to_pylist()], column.type)
    parquet.write_table(table.set_column(table.schema.get_field_index("sampling"), column, edited), recording)
    output = tools("import", str(recording), run=f"{tools.run}-edited", code=2)
    assert f"column sampling.{field}" in output and "has nulls in rows from 0" in output


def test_a_recording_without_the_optional_fields_is_imported(tools: Tools, recording: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    from penstock_tools.recordings.recording import OPTIONAL

    groups = [make_group(0), make_group(1)]
    tools.fill(groups)
    tools("export", str(recording))
    table = parquet.read_table(recording)
    for name in ("sampling", "trajectories"):
        kind = table.schema.field(name).type
        fields = [field for field in (kind if name == "sampling" else kind.value_type) if field.name not in OPTIONAL]
        short = pa.struct(fields) if name == "sampling" else pa.list_(pa.struct(fields))
        column = pa.array(table[name].to_pylist(), short)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    parquet.write_table(table, recording)
    run = f"{tools.run}-short"
    tools("import", str(recording), run=run)
    assert [content(group) for group in tools.taken(run, 2)] == [content(group) for group in groups]


def test_export_leaves_no_half_file_and_overwrites_only_by_force(tools: Tools, recording: Path) -> None:
    tools.fill([make_group(0)])
    tools("export", str(recording))
    assert "exists; choose another name or add --force" in tools("export", str(recording), code=2)
    tools("export", str(recording), "--force")
    assert "cannot be written" in tools("export", str(recording.parent / "nowhere" / "x.parquet"), code=2)
    assert [path.name for path in recording.parent.iterdir()] == [recording.name]


# ── a learner on an imported queue ──


@pytest.mark.long
def test_a_learner_trains_the_same_weights_on_an_imported_queue(
    tmp_path: Path, redis_process: RedisProcess, tools: Tools, recording: Path
) -> None:
    model = make_tiny_qwen2(tmp_path / "model", seed=5)
    original = make_config(tmp_path / "runs", model, redis_process.url, f"{tools.run}-original")
    replayed = make_config(tmp_path / "runs", model, redis_process.url, f"{tools.run}-replayed")
    asyncio.run(fill_queue(original))
    tools("export", str(recording), run=original.run)
    tools("import", str(recording), run=replayed.run)
    for config in (original, replayed):
        code, output = run_learner(config)
        assert code == 0, output[-3000:]
    first, second = outcome(original), outcome(replayed)
    assert first.digests[NUM_STEPS] == second.digests[NUM_STEPS]
    assert first.losses == second.losses
    assert first.ledger == second.ledger
    assert second.stat.trained == 8 and second.stat.conservation_error == 0


@pytest.mark.parametrize("loss_window_s", [0.0, 0.5])
def test_an_import_waits_until_its_ids_are_durable(
    loss_window_s: float, tools: Tools, recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a Redis that loses its tail could give the id of a trained group to another prompt."""
    run, sleep, waits = f"durable-in-{loss_window_s * 1000:.0f}-ms", asyncio.sleep, []

    async def noted_sleep(delay_s: float, *result: object) -> object:
        waits.append(delay_s)
        return await sleep(delay_s, *result)

    tools.fill([rich_group(1)])
    tools("export", str(recording))
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run: {run}\nmodel: {{path: {make_tiny_qwen2(tmp_path / 'model', seed=1)}}}\n"
        f"redis: {{url: '{tools.operator_url}'}}\nreplay: {{loss_window_s: {loss_window_s}}}\n"
    )
    monkeypatch.setattr(asyncio, "sleep", noted_sleep)
    assert cli.main(["queue", "import", str(recording), "--config", str(config)]) == 0
    assert any(delay_s == loss_window_s / 10 for delay_s in waits if delay_s) == (loss_window_s > 0)
    assert len(tools.taken(run, 1)) == 1
    assert tools.stat(run).admitted == 1
