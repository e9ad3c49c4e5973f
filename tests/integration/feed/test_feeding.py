"""`penstock feed` on a real Redis: it submits every prompt once even if it is killed, and it validates meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cancellation import end_task
from penstock.cli import main as cli
from penstock.codec import decode_prompt, encode_prompt
from penstock.config.loading import dump_config, validate
from penstock.config.run import RunConfig
from penstock.diagnosis.facts import RunStores, Validating
from penstock.errors import ConfigError, DeadlineExceeded
from penstock.feed.dataset_feed import Feeder, PromptStream
from penstock.feed.feed_process import feed_run
from penstock.feed.validation import Validator, VersionHold, result_line, validated_steps
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, PolicyRegistry, Quarantine, ServerRecord
from penstock.store.heartbeats import VALIDATOR, Heartbeats
from support.redis_server import RedisProcess

NUM_PROMPTS = 2000
EPOCHS = 3


def make_config(tmp_path: Path, redis_url: str, **dataset: Any) -> RunConfig:
    path = tmp_path / "train.jsonl"
    if not path.exists():
        rows = [{"prompt": f"{i}?", "reward_model": {"ground_truth": i}} for i in range(NUM_PROMPTS)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"file": str(path), "epochs": EPOCHS, "max_pending": 10**6, "num_samples": 2} | dataset
    return validate(
        {
            "run": "test", "run_dir": str(tmp_path), "model": {"path": "m"}, "redis": {"url": redis_url}, "seed": 7,
            "replay": {"max_staleness": 10**6}, "dataset": fields,
        },
        "test",
    )  # fmt: skip


def start_feed(config: RunConfig) -> subprocess.Popen[str]:
    config.folder.mkdir(parents=True, exist_ok=True)
    path = config.folder / "config.yaml"
    path.write_text(dump_config(config))
    command = [sys.executable, "-m", "penstock.cli.commands.feed", "--config", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def position_of(queue: RedisReplayQueue) -> int:
    feed = (await queue.feeds()).get("train")
    return feed.position if feed else 0


async def submitted(queue: RedisReplayQueue) -> list[int]:
    """Ground truths of all prompts, in the order of their ids."""
    payloads = await queue.client.hgetall(f"{queue.keys.prefix}prompts")
    return [decode_prompt(payloads[key]).ground_truth for key in sorted(payloads, key=int)]


async def test_a_config_without_a_redis_feeds_the_run_that_up_has_started(
    tmp_path: Path, redis_process: RedisProcess, queue: RedisReplayQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    """`penstock up` writes the address of its private Redis to the run's folder."""
    config = make_config(tmp_path, "", epochs=1)
    (tmp_path / "my-run.yaml").write_text(dump_config(config))
    words = ["feed", "--config", str(tmp_path / "my-run.yaml")]
    assert await asyncio.to_thread(cli.main, words) == 2
    assert f"start the run on this machine: `penstock up {tmp_path}/my-run.yaml`" in capsys.readouterr().err
    config.folder.mkdir()
    started = config.model_copy(update={"redis": config.redis.model_copy(update={"url": redis_process.url})})
    (config.folder / "config.yaml").write_text(dump_config(started))
    command = [sys.executable, "-m", "penstock.cli.main", *words]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(await submitted(queue)) == NUM_PROMPTS
    for command_words in (["queue", "stat"], ["doctor"]):
        assert await asyncio.to_thread(cli.main, [*command_words, "--config", str(tmp_path / "my-run.yaml")]) in (0, 1)
        assert "has no redis.url" not in capsys.readouterr().err


@pytest.mark.timeout(600)
async def test_a_feeder_that_is_killed_skips_nothing_and_repeats_nothing(
    tmp_path: Path, redis_process: RedisProcess, queue: RedisReplayQueue
) -> None:
    """Two feeders run at a time and are killed at random points. The first ones stop half-way, so that none has ended
    before it is killed."""
    config, chance = make_config(tmp_path, redis_process.url), random.Random(3)
    num_kills, end = 0, NUM_PROMPTS * EPOCHS
    half = make_config(tmp_path, redis_process.url, max_pending=end // 2)
    running: list[subprocess.Popen[str]] = []
    try:
        async with asyncio.timeout(240):
            while await position_of(queue) < end:
                running += [start_feed(half if num_kills < 3 else config) for _ in range(2 - len(running))]
                distance = 1 if num_kills < 3 else chance.randint(1, end // 2)
                furthest = end // 2 if num_kills < 4 else end  # at the third kill, one that stops half-way is left
                wanted_position = min(furthest, await position_of(queue) + distance)
                while await position_of(queue) < wanted_position:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(chance.uniform(0, 0.01))
                victim = running.pop(0)
                victim.kill()
                num_kills += victim.wait(60) == -signal.SIGKILL
                victim.communicate()
        while running:  # a dataset has one feeder at a time
            running[0].kill()
            running.pop(0).communicate()
        last = start_feed(config)
        running.append(last)
        output, error = last.communicate(timeout=60)
        assert (last.returncode, output.splitlines()) == (
            0,
            [
                "plan: 188 steps of 32 prompts from 3 epochs of 2000 prompts; the last step has 16",
                f"all {end} prompts of dataset 'train' are submitted",
            ],
        ), error
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert num_kills >= 3
    wanted = [prompt.ground_truth for prompt in PromptStream.read(config).chunk(0, end)]
    assert await submitted(queue) == wanted and len(wanted) == end


async def test_a_feeder_goes_on_when_redis_has_lost_its_tail(
    tmp_path: Path, redis_process: RedisProcess, queue: RedisReplayQueue
) -> None:
    """Redis goes back to an earlier state, with its prompts and its position, while the feeder runs."""
    config = make_config(tmp_path, redis_process.url, epochs=1)
    feeder = Feeder(queue, PromptStream.read(config))
    client = queue.client

    async def feed(position: int, count: int) -> None:
        payloads = [encode_prompt(prompt) for prompt in feeder.stream.chunk(position, count)]
        await queue.feed("train", feeder.fingerprint, position, payloads, [0] * count)

    await feed(0, 500)
    keys = [key async for key in client.scan_iter(f"{queue.keys.prefix}*")]
    kept = {key: await client.dump(key) for key in keys}
    await feed(500, 300)
    assert await position_of(queue) == 800
    for key, value in kept.items():
        await client.restore(key, 0, value, replace=True)
    assert await position_of(queue) == 500
    assert await feeder.run() == NUM_PROMPTS
    assert await submitted(queue) == [prompt.ground_truth for prompt in feeder.stream.chunk(0, NUM_PROMPTS)]


async def test_no_more_than_wanted_wait(
    tmp_path: Path, redis_process: RedisProcess, queue: RedisReplayQueue, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.feed")
    config = make_config(tmp_path, redis_process.url, max_pending=300, epochs=1)
    task = asyncio.create_task(Feeder(queue, PromptStream.read(config)).run())
    wide = RedisReplayQueue(queue.client, "test", config.replay)
    try:
        async with asyncio.timeout(60):
            num_leased = 0
            while not (waits := [text for text in caplog.messages if "dataset.max_pending" in text]):
                await asyncio.sleep(0.01)
            while num_leased < NUM_PROMPTS:
                assert (await queue.stat()).pending_prompts <= 300
                num_leased += len(await wide.lease("s", 200))
                await asyncio.sleep(0.01)
            assert await task == NUM_PROMPTS
    finally:
        await end_task(task)
    assert waits == ["300 prompts wait and dataset.max_pending is 300: submitting the next ones as they are leased"]


async def test_other_data_under_the_same_name_is_refused(
    tmp_path: Path, redis_process: RedisProcess, queue: RedisReplayQueue
) -> None:
    await Feeder(queue, PromptStream.read(make_config(tmp_path, redis_process.url, epochs=1))).run()
    reordered = PromptStream.read(make_config(tmp_path, redis_process.url, shuffle_seed=8))
    with pytest.raises(ConfigError, match=f"for its first {NUM_PROMPTS} prompts; give the same file and seed"):
        await Feeder(queue, reordered).run()
    more = PromptStream.read(make_config(tmp_path, redis_process.url, epochs=2))
    assert await Feeder(queue, more).run() == 2 * NUM_PROMPTS
    renamed = PromptStream.read(make_config(tmp_path, redis_process.url, shuffle_seed=8, name="again", epochs=1))
    assert await Feeder(queue, renamed).run() == NUM_PROMPTS


@pytest.fixture
async def server(queue: RedisReplayQueue) -> AsyncIterator[list[Any]]:
    """A server that answers evaluations: sample i of prompt p is right if i <= p. Yields the prompts that it saw."""
    seen: list[Any] = []

    async def serve() -> None:
        while True:
            for lease in await queue.lease("s", 10):
                prompt = decode_prompt(lease.payload)
                seen.append(prompt)
                rewards = [float(index <= prompt.ground_truth) for index in range(prompt.num_samples)]
                await queue.record_evaluation(prompt.evaluation_id, lease, rewards, 5, 6)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(serve())
    yield seen
    await end_task(task)


async def test_validation_has_sampling_of_its_own_and_comes_once_a_step(
    tmp_path: Path, redis_process: RedisProcess, queue: RedisReplayQueue, server: list[Any]
) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("".join(json.dumps({"prompt": "?", "reward_model": {"ground_truth": i}}) + "\n" for i in (0, 3)))
    sampling = {"num_samples": 4, "temperature": 0.5, "top_p": 0.5, "max_tokens": 9, "every_steps": 10}
    config = make_config(tmp_path, redis_process.url, validation={"file": str(heldout)} | sampling)
    results = config.folder / "validation.jsonl"
    await queue.take_term(0)
    for _ in range(2):  # the second validator finds the results of the first
        task = asyncio.create_task(Validator.read(config, queue).run())
        try:
            async with asyncio.timeout(120):
                for step in (0, 13, 20):
                    await queue.publish(step + 1, step, b"")
                    while step // 10 * 10 not in validated_steps(results):
                        await asyncio.sleep(0.02)
        finally:
            await end_task(task)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 10, 20]
    assert lines[0]["score"] == (1 + 4) / 8
    assert lines[0]["pass_at"] == {"1": pytest.approx(5 / 8), "2": pytest.approx(3 / 4), "4": 1.0}
    assert (lines[0]["policy_version_min"], lines[0]["policy_version_max"]) == (5, 6)
    assert len(server) == 6 and len({prompt.sampling.seed for prompt in server}) == 2
    assert (server[0].sampling.temperature, server[0].sampling.top_p, server[0].sampling.max_tokens) == (0.5, 0.5, 9)


@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "told to stop"])
async def test_the_validator_has_a_heartbeat_until_it_ends(
    tmp_path: Path, redis_process: RedisProcess, queue: RedisReplayQueue, server: list[Any], is_finished: bool
) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(json.dumps({"prompt": "?", "reward_model": {"ground_truth": 1}}) + "\n")
    config = make_config(tmp_path, redis_process.url, file=None, validation={"file": str(heldout), "only": True})
    await queue.take_term(0)
    heartbeats = Heartbeats(queue.client, config.run)
    task = asyncio.create_task(feed_run(config))
    async with asyncio.timeout(120):
        while VALIDATOR not in await heartbeats.ages_s():
            await asyncio.sleep(0.02)
        if is_finished:
            await queue.finish(0)
            await task
        else:
            await end_task(task)
    assert VALIDATOR not in await heartbeats.ages_s()


async def test_a_validation_that_no_server_answers_ends_with_a_named_error(
    tmp_path: Path, redis_process: RedisProcess, queue: RedisReplayQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.feed.validation.POLL_S", 0.02)
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(json.dumps({"prompt": "?"}) + "\n")
    config = make_config(tmp_path, redis_process.url, validation={"file": str(heldout)})
    validator, stores = Validator.read(config, queue), RunStores.of(queue.client, config)
    validator.stall_timeout_s = 0.2
    assert (await stores.read(config)).validation is None
    with pytest.raises(DeadlineExceeded, match="validation-train-0 has 0 of 1 prompts, .* are rollout servers READY"):
        await validator.validate(0)
    assert (await stores.read(config)).validation == Validating(0, num_finished=0, num_prompts=1)
    [lease] = await queue.lease("s", 1)
    await queue.record_evaluation("validation-train-0", lease, [1.0], 0, 0)
    assert (await stores.read(config)).validation is None
    assert (await validator.validate(0)).num_finished == 1, "the next try goes on with the same evaluation"


async def test_a_validation_says_how_many_prompts_failed(
    tmp_path: Path, redis_process: RedisProcess, queue: RedisReplayQueue, caplog: pytest.LogCaptureFixture
) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(2 * (json.dumps({"prompt": "?"}) + "\n"))
    validator = Validator.read(make_config(tmp_path, redis_process.url, validation={"file": str(heldout)}), queue)
    payloads = [encode_prompt(replace(prompt, evaluation_id="validation-train-0")) for prompt in validator.prompts]
    await queue.create_evaluation("validation-train-0", payloads)
    good, bad = await queue.lease("s", 2)
    await queue.record_evaluation("validation-train-0", good, [1.0], 0, 0)
    await queue.give_back("s", bad, "reward_failed", is_final=True)
    await validator.validate(0)
    [line] = [json.loads(line) for line in validator.results.read_text().splitlines()]
    assert (line["num_failed"], line["score"]) == (1, 1.0)
    assert "1 of 2 prompts failed and are not in the score" in caplog.text


@pytest.mark.parametrize("score", ["acc", "accuracy"])
async def test_pass_at_k_of_a_validation_counts_the_part_that_is_asked_for(
    tmp_path: Path, redis_process: RedisProcess, queue: RedisReplayQueue, caplog: pytest.LogCaptureFixture, score: str
) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(json.dumps({"prompt": "?"}) + "\n")
    validation = {"file": str(heldout), "num_samples": 2, "score": score}
    validator = Validator.read(make_config(tmp_path, redis_process.url, validation=validation), queue)
    prompt = replace(validator.prompts[0], evaluation_id="validation-train-0")
    await queue.create_evaluation("validation-train-0", [encode_prompt(prompt)])
    [lease] = await queue.lease("s", 1)
    parts = {"acc": [1.0, 0.0], "format": [1.0, 0.5]}
    await queue.record_evaluation("validation-train-0", lease, [0.5, 0.25], 0, 0, "math", parts=parts)
    await validator.validate(0)
    [line] = [json.loads(line) for line in validator.results.read_text().splitlines()]
    assert line["parts"] == {"math": {"acc": 0.5, "format": 0.75}}
    assert line["pass_at"] == ({"1": 0.5, "2": 1.0} if score == "acc" else {})
    assert ("has the part 'accuracy'" in caplog.text) == (score == "accuracy")
    assert "format 0.750" in result_line(line)
    named = {"math/reward/mean@2": 0.375, "math/acc/mean@2": 0.5, "math/format/mean": 0.75}
    named |= {"train/pass@2": 1.0} if score == "acc" else {}
    found = await queue.evaluation_history()
    assert found.items() >= {f"{name}-0": value for name, value in named.items()}.items()
    assert not found.keys() & {"math/acc/mean-0", "train/pass@1-0"}, "drawn under other names, or not at all"


def test_files_and_data_sources_of_a_validation_take_turns(tmp_path: Path) -> None:
    """The first prompts have their samples written. Seeds are those of the order in the files, as ever."""
    for name, sources in (("one", "aaab"), ("two", "ac")):
        rows = [{"prompt": f"{name}{i}", "data_source": source} for i, source in enumerate(sources)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [{"file": str(tmp_path / f"{name}.jsonl")} for name in ("one", "two")]
    nothing: Any = None
    validator = Validator.read(make_config(tmp_path, "redis://127.0.0.1:1", validation={"file": files}), nothing)
    texts = [prompt.messages[0][1] for prompt in validator.prompts]
    assert texts == ["one0", "one3", "two0", "two1", "one1", "one2"]
    by_text = {text: prompt.sampling.seed for text, prompt in zip(texts, validator.prompts, strict=True)}
    assert [*sorted(by_text, key=lambda text: by_text[text] or 0)] == ["one0", "one1", "one2", "one3", "two0", "two1"]


class Server:
    """A server that reports a version, and answers evaluations with it at each turn."""

    def __init__(self, server_id: str, queue: RedisReplayQueue, fleet: Fleet) -> None:
        self.server_id = server_id
        self.queue = queue
        self.fleet = fleet
        self.version = 5
        self.num_answers = 0

    async def turn(self, limit: int = 1) -> None:
        record = ServerRecord(self.server_id, "127.0.0.1:1", "torch", policy_version=self.version)
        if (await self.fleet.report(record)).state is None:
            await self.fleet.set_state(self.server_id, "READY")
        for lease in await self.queue.lease(self.server_id, limit):
            evaluation_id = decode_prompt(lease.payload).evaluation_id
            await self.queue.record_evaluation(evaluation_id, lease, [1.0], self.version, self.version)
            self.num_answers += 1


@pytest.fixture
def pinned_validation(
    tmp_path: Path, redis_process: RedisProcess, queue: RedisReplayQueue, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """A maker of validators with 20 prompts, the policies and the fleet."""
    for name, value in (("validation.STABLE_S", 0.4), ("validation.HOLD_POLL_S", 0.05), ("validation.POLL_S", 0.05)):
        monkeypatch.setattr(f"penstock.feed.{name}", value)
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(20)))
    config = make_config(tmp_path, redis_process.url, validation={"file": str(heldout)})
    policies, fleet = PolicyRegistry(queue.client, "test"), Fleet(queue.client, "test")

    def make() -> Validator:
        note = config.folder / "validation.pinned"
        hold = VersionHold(policies, fleet, note, max_silence_s=120.0, num_servers=2, join_timeout_s=60.0)
        return Validator.read(config, queue, hold)

    return make, policies, fleet


@pytest.mark.parametrize("lost_by", ["", "silence", "quarantine"])
async def test_one_server_answers_a_validation_with_one_version_while_the_others_go_on(
    queue: RedisReplayQueue, pinned_validation: Any, lost_by: str
) -> None:
    make, policies, fleet = pinned_validation
    servers = [Server(server_id, queue, fleet) for server_id in "ab"]
    validator = make()
    task = asyncio.create_task(validator.validate(0))
    lost: list[Server] = []
    try:
        async with asyncio.timeout(120):
            await servers[0].turn()  # it is alone at first: the validator waits for the other one
            while not task.done():
                pins = await policies.pins()
                for server in servers:
                    if server.server_id not in pins:  # training goes on
                        server.version += len(pins) > 0
                    elif lost_by == "silence" and server.num_answers:
                        lost = [server]
                        validator.hold.max_silence_s = 1.0  # the validator looks at no other server
                    elif lost_by == "quarantine" and server.num_answers:
                        record = Quarantine(server.server_id, 0.5, 0.1, policy_version=5, since_ms=1)
                        await queue.client.hset(fleet.keys.quarantined, server.server_id, record.to_json())
                    if server not in lost:
                        await server.turn()
                await asyncio.sleep(0.02)
            evaluation = await task
    finally:
        await end_task(task)
    assert evaluation.num_finished == 20 and await policies.pins() == {}
    answers = sorted(server.num_answers for server in servers)
    if lost_by:
        assert answers == [1, 19], "the rest is answered by the fleet"
    else:
        assert answers == [0, 20]
        assert evaluation.policy_version_min == evaluation.policy_version_max == 5
        assert max(server.version for server in servers) > 6


@pytest.mark.parametrize(("returns", "held_at"), [(True, 6), (False, 7)])
async def test_a_server_that_a_push_has_moved_on_is_still_held(
    queue: RedisReplayQueue, pinned_validation: Any, monkeypatch: pytest.MonkeyPatch, returns: bool, held_at: int
) -> None:
    """The server's report is out of date: a push moves it to another version at the moment in which it is pinned."""
    monkeypatch.setattr("penstock.feed.validation.RETURN_TIMEOUT_S", 60.0 if returns else 0.8)
    monkeypatch.setattr("penstock.feed.validation.STABLE_TIMEOUT_S", 120.0)
    make, policies, fleet = pinned_validation
    servers = [Server(server_id, queue, fleet) for server_id in "ab"]
    servers[1].version = 6
    pin, has_moved_on = policies.pin, False

    async def pin_and_move_on(name: str, version: int) -> None:
        nonlocal has_moved_on
        await pin(name, version)
        if name == "b" and not has_moved_on:
            servers[1].version, has_moved_on = 7, True
            await servers[1].turn()

    monkeypatch.setattr(policies, "pin", pin_and_move_on)
    task = asyncio.create_task(make().hold.begin("validation-train-0"))
    try:
        async with asyncio.timeout(120):
            while not task.done():
                pins = await policies.pins()
                for server in servers:
                    await server.turn()
                if has_moved_on and returns:
                    servers[1].version = pins.get("b", 7)
                await asyncio.sleep(0.2)
            await task
    finally:
        await end_task(task)
    assert await policies.pins() == {"b": held_at, "validation-train-0": held_at}


async def test_what_a_killed_validator_held_is_freed_by_the_next(
    queue: RedisReplayQueue, pinned_validation: Any
) -> None:
    make, policies, fleet = pinned_validation
    servers = [Server(server_id, queue, fleet) for server_id in "ab"]
    killed = make()
    beginning = task = asyncio.create_task(killed.hold.begin("validation-train-0"))
    try:
        async with asyncio.timeout(120):
            while not beginning.done():
                for server in servers:
                    await server.turn()
                await asyncio.sleep(0.05)
            assert len(await policies.pins()) == 2
            killed.results.parent.mkdir(parents=True, exist_ok=True)
            killed.results.write_text('{"step": 0}\n')  # so no validation is due that would unpin them
            task = asyncio.create_task(make().run())
            while await policies.pins():
                await asyncio.sleep(0.05)
    finally:
        await end_task(beginning)
        await end_task(task)


async def test_a_second_feed_of_the_same_dataset_says_so(
    tmp_path: Path, redis_process: RedisProcess, queue: RedisReplayQueue
) -> None:
    config = make_config(tmp_path, redis_process.url, epochs=0)
    first = start_feed(config)
    try:
        async with asyncio.timeout(60):
            while await position_of(queue) == 0:
                await asyncio.sleep(0.05)
        second = start_feed(config)
        _, error = await asyncio.to_thread(second.communicate, timeout=60)
        assert second.returncode == 1
        assert f"process {first.pid} feeds dataset 'train' to run {config.run} already" in error
        assert error.count("\n") == 1
    finally:
        first.kill()
        first.communicate(timeout=60)


def test_what_the_command_refuses(tmp_path: Path, redis_process: RedisProcess) -> None:
    wrong, heldout = tmp_path / "wrong.jsonl", tmp_path / "heldout.jsonl"
    wrong.write_text('{"question": "1+1="}\n')
    heldout.write_text('{"prompt": "1+1="}\n')
    for change, message in (
        ({"file": None}, "dataset.file is not set"),
        ({"file": str(wrong), "validation": {"file": str(heldout)}}, "wrong.jsonl line 1: prompt: must be"),
        ({"file": str(tmp_path / "absent.parquet")}, "absent.parquet does not exist"),
        ({"validation": {"file": str(tmp_path / "absent.jsonl")}}, "absent.jsonl does not exist"),
    ):
        process = start_feed(make_config(tmp_path, redis_process.url, **change))
        _, error = process.communicate(timeout=60)
        assert process.returncode == 2 and message in error and error.count("\n") == 1


async def test_feeds_of_two_datasets_keep_their_plans_and_addresses(
    tmp_path: Path, redis_process: RedisProcess, queue: RedisReplayQueue
) -> None:
    """The first is still there when the second one begins and ends."""
    first = make_config(tmp_path, redis_process.url, name="first", validation={"file": str(tmp_path / "train.jsonl")})
    second = make_config(tmp_path, redis_process.url, name="second", epochs=1)
    feeding = asyncio.create_task(feed_run(first))
    try:
        async with asyncio.timeout(60):
            while not list(first.folder.glob("feed*.json")):
                await asyncio.sleep(0.01)
            await feed_run(second)
        files = sorted(first.folder.glob("feed*.json"))
        assert [file.name for file in files] == ["feed-first.json", "feed-second.json"]
        announced, ended = (json.loads(file.read_text()) for file in files)
        assert announced["metrics_port"] > 0 and "metrics_port" not in ended
        assert announced["plan"] != ended["plan"]
    finally:
        await end_task(feeding)
