"""`penstock queue` on a real Redis: looks, recordings, dead letters, and a learner on an imported queue."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import redis

from conftest import RedisProcess
from groups import make_group
from learner_runs import NUM_STEPS, fill_queue, make_config, outcome, run_learner
from penstock.cli import main as cli
from penstock.codec import decode_group, decode_prompt, encode_group, encode_prompt
from penstock.config.loading import dump_config
from penstock.config.service import RedisConfig, ReplayConfig
from penstock.redis_client import connect
from penstock.replay.contract import QueueStat
from penstock.replay.inspection import QueueInspector
from penstock.replay.recording import SERVER_ID, _import_key
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.trajectory import Group, Prompt, Sampling, Trajectory, VersionSegment
from tiny_model import make_tiny_qwen2

USERS = Path(__file__).parents[2] / "deploy" / "redis" / "users.acl"
LOOSE = ReplayConfig(groups_per_step=64, max_staleness=1000, max_attempts=1)
TIGHT = ReplayConfig(groups_per_step=1, max_staleness=0)
T = TypeVar("T")


class Tools:
    """`penstock queue` against one Redis, as its operator, and the queue itself to check what it did."""

    def __init__(self, url: str, operator_url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self.operator_url = operator_url
        self.capsys = capsys
        self.run = f"tools-{uuid.uuid4().hex[:12]}"

    def __call__(self, *words: str, run: str = "", code: int = 0) -> str:
        """Standard output of the command, or, where it should fail, its one line of standard error."""
        assert cli.main(["queue", *words, "--redis-url", self.operator_url, "--run", run or self.run]) == code
        captured = self.capsys.readouterr()
        if code:
            assert captured.err.count("\n") == 1, captured.err
        return captured.err if code else captured.out

    def json(self, *words: str, run: str = "") -> Any:
        return json.loads(self(*words, "--json", run=run))

    def on(self, use: Callable[[RedisReplayQueue], Awaitable[T]], replay: ReplayConfig = LOOSE, run: str = "") -> T:
        async def connected() -> T:
            client = connect(RedisConfig(url=self.url))
            try:
                return await use(RedisReplayQueue(client, run or self.run, replay))
            finally:
                await client.aclose()

        return asyncio.run(connected())

    def fill(self, groups: Sequence[Group], prompt: Prompt | None = None) -> None:
        """Submit a prompt for each group and append it, as a rollout server would."""

        async def fill(queue: RedisReplayQueue) -> None:
            payload = encode_prompt(prompt or Prompt(token_ids=(1, 2)))
            await queue.submit([payload] * len(groups), [0] * len(groups), "")
            for lease, group in zip(await queue.lease("rollout-0", len(groups)), groups, strict=True):
                identified = replace(group, run=self.run, prompt_id=lease.prompt_id, attempt=lease.attempt)
                assert await queue.append(lease, encode_group(identified), group.min_version) == "accepted"

        self.on(fill)

    def deliver(self, num_groups: int) -> list[int]:
        async def take(queue: RedisReplayQueue) -> list[int]:
            await queue.take_term(0)
            return await queue.take(1, num_groups)

        return self.on(take)

    def bury(self, prompts: Sequence[bytes], reason: str) -> None:
        async def bury(queue: RedisReplayQueue) -> None:
            await queue.submit(prompts, [0] * len(prompts), "")
            for lease in await queue.lease("rollout-0", len(prompts)):
                await queue.give_back("rollout-0", lease, failure=reason)

        self.on(bury)

    def stat(self, run: str = "") -> QueueStat:
        stat = self.on(lambda queue: queue.stat(), run=run)
        assert stat.conservation_error == 0, stat
        return stat

    def taken(self, run: str, num_groups: int) -> list[Group]:
        """What a learner of `run` gets, in its order."""

        async def take(queue: RedisReplayQueue) -> list[Group]:
            await queue.take_term(0)
            await queue.restore(0)
            ids = await queue.take(1, num_groups)
            return [decode_group(delivery.payload) for delivery in await queue.fetch(ids)]

        return self.on(take, run=run)


@pytest.fixture
def tools(redis_process: RedisProcess, capsys: pytest.CaptureFixture[str]) -> Tools:
    """The operator has the rights of deploy/redis/users.acl and no others."""
    [rights] = [line for line in USERS.read_text().splitlines() if line.startswith("user operator ")]
    with redis.Redis.from_url(redis_process.url) as client:
        client.execute_command("ACL", "SETUSER", *rights.split()[1:], ">secret")
    return Tools(redis_process.url, f"redis://operator:secret@127.0.0.1:{redis_process.port}/0", capsys)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return tmp_path / "groups.parquet"


def rich_group(index: int) -> Group:
    """A group that uses every field."""
    random = np.random.default_rng(index)
    trajectories = []
    for sample in range(int(random.integers(1, 5))):
        length = int(random.integers(2, 40))
        trajectories.append(
            Trajectory(
                token_ids=random.integers(-(2**31), 2**31, length).astype(np.int32),
                loss_mask=random.integers(0, 2, length).astype(np.uint8),
                log_probs=-random.exponential(1.0, length).astype(np.float32),
                segments=(VersionSegment(0, 1, 7), VersionSegment(1, length, 2**40)),
                reward=float(random.normal()),
                finish_reason=("stop", "length", "aborted")[sample % 3],  # type: ignore[arg-type]
                reward_parts={f"Teil {part} µ": float(random.normal()) for part in range(sample)},
                is_baseline=sample == 2,
            )
        )
    return Group(
        run="recorded",
        prompt_id=1,
        attempt=1,
        server_id=f"rollout-{index}",
        data_source="gsm8k" if index % 2 else "",
        sampling=Sampling(temperature=0.7, top_p=0.9, max_tokens=64, seed=index if index % 2 else None),
        prompt_token_ids=random.integers(0, 1000, 1 + index % 3).astype(np.int32),
        trajectories=tuple(trajectories),
        agent_name="tool_agent",
        finished_at_ms=1_700_000_000_000 + index,
    )


def content(group: Group) -> list[Any]:
    """Everything but the identity, which an import assigns anew; comparable with ==, types of arrays included."""
    arrays = [
        (array.dtype.str, array.tolist())
        for t in group.trajectories
        for array in (t.token_ids, t.loss_mask, t.log_probs)
    ]
    others = [(t.segments, t.reward, t.finish_reason, t.reward_parts, t.is_baseline) for t in group.trajectories]
    return [
        group.server_id, group.data_source, group.agent_name, group.sampling, group.finished_at_ms,
        group.prompt_token_ids.dtype.str, group.prompt_token_ids.tolist(), arrays, others,
    ]  # fmt: skip


# ── looks ──


def test_stat_counts_every_place_and_checks_conservation(tools: Tools) -> None:
    tools.fill([replace(make_group(i), finished_at_ms=1) for i in range(5)])
    tools.deliver(2)
    tools.bury([b"", b""], "engine_error: out of memory")
    tools.on(lambda queue: queue.submit([b"a", b"b", b"c"], [0] * 3, ""))
    tools.on(lambda queue: queue.lease("rollout-0", 1))
    report = tools.json("stat")
    places = {place["name"]: place for place in report["places"]}
    counts = {name: place["count"] for name, place in places.items() if place["count"]}
    assert counts == {"pending": 2, "leased": 1, "ready": 3, "delivered": 2, "dead letters": 2}
    assert places["ready"]["num_bytes"] > 0 and places["delivered"]["num_bytes"] > 0
    assert places["ready"]["oldest_age_s"] > 1e9 and 0 <= places["dead letters"]["oldest_age_s"] < 600
    assert (report["admitted"], report["conservation_error"]) == (8, 0)
    assert report["dead_letter_reasons"] == {"engine_error": 2}
    shown = tools("stat")
    assert "conservation ok" in shown and "engine_error" in shown and "dead letters" in shown


def test_peek_shows_the_next_groups_and_takes_nothing(tools: Tools) -> None:
    groups = [make_group(i, version=i) for i in range(4)]
    tools.fill(groups)
    first, second = tools.json("peek", "--limit", "2")
    assert (first["prompt_id"], second["prompt_id"]) == (1, 2)
    assert (first["server_id"], second["min_version"], second["max_version"]) == ("rollout-0", 1, 1)
    assert first["num_response_tokens"] == groups[0].num_response_tokens
    assert first["mean_reward"] == groups[0].mean_reward
    assert "rollout-0" in tools("peek")
    assert tools.stat().queued == 4 and tools.stat().delivered == 0


def test_peek_shows_one_group_in_full(tools: Tools) -> None:
    group = rich_group(3)
    tools.fill([group])
    shown = tools.json("peek", "--prompt-id", "1")
    for trajectory, record in zip(group.trajectories, shown["trajectories"], strict=True):
        assert record["token_ids"] == trajectory.token_ids.tolist()
        assert record["log_probs"] == trajectory.log_probs.tolist()
        assert record["policy_versions"] == trajectory.token_versions().tolist()
        assert record["reward_parts"] == trajectory.reward_parts
    assert "log-prob" in tools("peek", "--prompt-id", "1")
    assert "no group of prompt 9 is queued" in tools("peek", "--prompt-id", "9", code=1)


def test_a_group_that_cannot_be_decoded_is_shown_and_not_exported(tools: Tools, recording: Path) -> None:
    async def poison(queue: RedisReplayQueue) -> None:
        await queue.submit([b""], [0], "")
        [lease] = await queue.lease("rollout-0", 1)
        await queue.append(lease, b"garbage", 0)

    tools.on(poison)
    tools.fill([make_group(2)])
    assert "wrong magic" in tools.json("peek")[0]["problem"]
    assert "wrong magic" in tools("peek", "--prompt-id", "1", code=1)
    shown = tools("export", str(recording))
    assert "exported 1 groups" in shown and "left out prompt 1: corrupt" in shown


# ── recordings ──


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
    """Died after the prompts of the first rows were leased; one lease has run out since, one has been given back."""
    tools.fill([make_group(i) for i in range(10)])
    tools("export", str(recording))
    other = f"{tools.run}-resumed"

    async def die(queue: RedisReplayQueue) -> None:
        inspector = QueueInspector(queue.client, other)
        leases = await inspector.admit(_import_key(recording, 0), SERVER_ID, 60, [(row, b"", 0) for row in range(3)])
        await queue.give_back(SERVER_ID, leases[0])

    tools.on(die, run=other)
    assert (tools.stat(other).admitted, tools.stat(other).in_flight) == (3, 3)
    assert "imported 10 groups" in tools("import", str(recording), run=other)
    stat = tools.stat(other)
    assert (stat.admitted, stat.queued, stat.in_flight, stat.pending) == (10, 10, 0, 0)
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
        ("trajectories", "row 0: a group without trajectories"),
    ],
)
def test_a_recording_that_was_edited_wrongly_is_refused(
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


def test_export_leaves_no_half_file_and_overwrites_only_by_force(tools: Tools, recording: Path) -> None:
    tools.fill([make_group(0)])
    tools("export", str(recording))
    assert "exists; choose another name or add --force" in tools("export", str(recording), code=2)
    tools("export", str(recording), "--force")
    assert "cannot be written" in tools("export", str(recording.parent / "nowhere" / "x.parquet"), code=2)
    assert [path.name for path in recording.parent.iterdir()] == [recording.name]


# ── dead letters ──

QUESTION = encode_prompt(Prompt(messages=(("user", "2 + 2 = ?"),), ground_truth=4, priority=5))


def test_dead_letters_are_listed_and_shown(tools: Tools) -> None:
    async def poison(queue: RedisReplayQueue) -> None:
        await queue.submit([QUESTION, QUESTION], [5, 5], "")
        good, bad = await queue.lease("rollout-0", 2)
        await queue.append(good, encode_group(make_group(good.prompt_id)), 0)
        await queue.append(bad, b"garbage", 0)
        await queue.take_term(0)
        for prompt_id in await queue.take(1, 2):
            await queue.dead_letter(prompt_id, f"non_finite: made up for prompt {prompt_id}")

    tools.on(poison)
    tools.bury([QUESTION], "engine_error")
    letters = tools.json("dlq")
    assert [letter["prompt_id"] for letter in letters] == [3, 2, 1], "newest first"
    assert [letter["reason"] for letter in tools.json("dlq", "list", "--reason", "engine_error")] == ["engine_error"]
    assert len(tools.json("dlq", "list", "--limit", "2")) == 2
    assert "non_finite: made up" in tools("dlq")
    good = tools.json("dlq", "show", letters[2]["id"])
    assert good["prompt"]["messages"] == [["user", "2 + 2 = ?"]]
    assert len(good["group"]["trajectories"]) == 4
    bad = tools.json("dlq", "show", letters[1]["id"])
    assert bad["group"] is None and "wrong magic" in bad["group_problem"]
    assert "2 + 2 = ?" in tools("dlq", "show", letters[0]["id"])
    assert "there is no dead letter 1-1" in tools("dlq", "show", "1-1", code=1)
    assert "is not the id of a dead letter" in tools("dlq", "show", "yesterday", code=2)


def test_requeued_prompts_are_new_submissions(tools: Tools) -> None:
    tools.bury([QUESTION] * 250, "engine_error")
    tools.bury([QUESTION], "reward_error")
    first = tools.json("dlq", "list", "--limit", "1000")[-1]["id"]
    assert tools.json("requeue", first)["requeued"] == [{"id": first, "prompt_id": 252}]
    assert "there is no dead letter" in tools("requeue", first, code=1)
    assert "requeued 249" in tools("requeue", "--reason", "engine_error")
    assert "requeued 1 " in tools("requeue", "--all")
    assert tools.json("dlq") == []
    stat = tools.stat()
    assert (stat.admitted, stat.dead_lettered, stat.pending) == (251, 251, 251)
    [lease] = tools.on(lambda queue: queue.lease("rollout-0", 1))
    assert (lease.prompt_id, lease.attempt, lease.payload) == (252, 1, QUESTION)
    assert tools.stat().admitted == 252


def test_a_dead_letter_without_its_prompt_stays(tools: Tools) -> None:
    tools.bury([b"", QUESTION], "engine_error")
    error = tools("requeue", "--all", code=1)
    assert "1 dead letters were left where they are" in error and "purge it" in error
    assert len(tools.json("dlq")) == 1
    assert tools.stat().pending == 1


def test_purging_needs_a_yes(tools: Tools) -> None:
    tools.bury([QUESTION] * 3, "engine_error")
    first = tools.json("dlq")[0]["id"]
    assert "is needed to delete 3 dead letters" in tools("dlq", "purge", "--all", code=2)
    assert len(tools.json("dlq")) == 3
    assert "purged 1 " in tools("dlq", "purge", first, "--yes")
    assert "purged 2 " in tools("dlq", "purge", "--all", "--yes")
    assert tools.json("dlq") == []
    assert tools.stat().dead_lettered == 3


# ── the command itself ──


def test_wrong_usage_is_one_line(tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "run 'nobody' has no queue on this Redis" in tools("stat", run="nobody", code=1)
    tools.bury([QUESTION], "engine_error")
    assert "only one of these" in tools("requeue", code=2)
    assert "only one of these" in tools("dlq", "purge", "1-1", "--all", code=2)
    assert "--limit: must be between" in tools("peek", "--limit", "0", code=2)
    monkeypatch.chdir(tmp_path)
    for words, problem in (
        ([], "there is no run in runs/"),
        (["--redis-url", tools.url], "--redis-url needs --run NAME"),
        (["--redis-url", "http://here", "--run", "x"], "--redis-url: "),
        (["--redis-url", "redis://127.0.0.1:1", "--run", "x"], "Redis does not answer"),
        (["--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
    ):
        assert cli.main(["queue", "stat", *words]) in (1, 2)
        error = tools.capsys.readouterr().err
        assert problem in error and error.count("\n") == 1, error


def test_the_newest_run_of_this_folder_is_the_default(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.fill([make_group(0)])
    config = make_config(tmp_path / "runs", tmp_path, tools.url, tools.run)
    config.folder.mkdir(parents=True)
    (config.folder / "config.yaml").write_text(dump_config(config))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["queue", "stat", "--json"]) == 0
    report = json.loads(tools.capsys.readouterr().out)
    assert report["run"] == tools.run and report["admission_limit"] == 101 * 2


@pytest.mark.parametrize("words", [["--help"], ["dlq", "--help"], ["import", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    script = f"""
import sys
from penstock.cli.main import main
try:
    code = main(["queue", *{words!r}])
except SystemExit as exit:
    code = exit.code
heavy = sorted({{"numpy", "pyarrow", "redis", "pydantic", "rich"}} & set(sys.modules))
assert not code and not heavy, (code, heavy)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


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


def test_an_import_waits_until_its_ids_have_settled(tools: Tools, recording: Path, tmp_path: Path) -> None:
    """Else a Redis that loses its tail would give the id of a trained group to another prompt."""
    tools.fill([rich_group(1)])
    tools("export", str(recording))
    settle_s = 1.0
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run: settling\nmodel: {{path: {make_tiny_qwen2(tmp_path / 'model', seed=1)}}}\n"
        f"redis: {{url: '{tools.operator_url}'}}\nreplay: {{settle_s: {settle_s}}}\n"
    )
    started = time.monotonic()
    assert cli.main(["queue", "import", str(recording), "--config", str(config)]) == 0
    assert time.monotonic() - started >= settle_s
    assert len(tools.taken("settling", 1)) == 1
    assert tools.stat("settling").admitted == 1
