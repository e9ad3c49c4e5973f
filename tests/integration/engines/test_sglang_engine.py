"""The SGLang engine beyond the promises of every engine: its child process, and what happens if that fails.

A stand-in that speaks SGLang's protocol over a real model takes the place of SGLang's server.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY, generate_latest

from penstock.config.rollout import EngineConfig
from penstock.errors import ConfigError, InvalidInput, Unavailable, WeightPushFailed
from penstock.trajectory import Sampling
from penstock_rollout.engines.engine import GenerateRequest
from penstock_rollout.engines.sglang import calls as sglang_calls
from penstock_rollout.engines.sglang.engine import SglangEngine
from support.processes import command_of, is_alive, is_running
from support.served_engines import (
    LONG,
    Answer,
    Served,
    assert_log_probs,
    hold_decoding,
    load_model,
    until_submitted,
)
from support.tiny_models import make_tiny_qwen2

STAND_IN = "support.sglang.stand_in"
ENDLESS = Sampling(temperature=0, max_tokens=500, ignore_eos=True)
"""As long as the model can answer, so that it still runs when the next thing happens."""
PATHS = {"/generate", "/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk"}
SCRIPT = """
import asyncio, pathlib, sys
from penstock.config.rollout import EngineConfig
from penstock_rollout.engines.sglang.engine import SglangEngine

async def main():
    config = EngineConfig(name="sglang")
    engine = SglangEngine(config, pathlib.Path(sys.argv[1]), "float32", 0, module="support.sglang.stand_in")
    await engine.start(0)
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def serving(folder: Path, **settings: object) -> AsyncIterator[Served]:
    make_tiny_qwen2(folder, seed=0)
    config = EngineConfig.model_validate({"name": "sglang", "max_model_len": 512} | settings)
    engine = SglangEngine(config, folder, "float32", seed=0, module=STAND_IN)
    try:
        await engine.start(policy_version=5)
        yield Served(engine, load_model(folder))
    finally:
        await engine.stop()


@pytest.fixture(scope="module")
def requests_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The requests to the server of `served`, one per line."""
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, requests_log: Path) -> AsyncIterator[Served]:
    """An engine for the tests that leave it unchanged, and the last one. It decodes two requests at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAND_IN_REQUESTS", str(requests_log))
        async with serving(tmp_path_factory.mktemp("model"), max_num_seqs=2) as served:
            yield served


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file. The word that a test writes into it makes the stand-in misbehave."""
    path = tmp_path / "fault"
    monkeypatch.setenv("STAND_IN_FAULT", str(path))
    return path


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that receives the pid of a process that the stand-in starts."""
    path = tmp_path / "helper"
    monkeypatch.setenv("STAND_IN_HELPER", str(path))
    yield path
    if path.exists() and psutil.pid_exists(int(path.read_text())):
        os.kill(int(path.read_text()), signal.SIGKILL)


def child_of(pid: int) -> psutil.Process:
    """The newest child of the process that is a stand-in."""
    children = [process for process in psutil.Process(pid).children() if is_alive(process)]
    return [process for process in children if STAND_IN in command_of(process)][-1]


async def until_gone(*pids: int) -> None:
    async with asyncio.timeout(60):
        while any(is_running(pid) for pid in pids):
            await asyncio.sleep(0.05)


def count_metrics() -> int:
    return generate_latest(REGISTRY).decode().count("# TYPE sglang:num_running_reqs")


async def push(served: Served) -> int:
    return await served.update(served.next_model())


async def test_waiting_requests_are_submitted_again_and_see_the_new_version_only(
    served: Served, requests_log: Path
) -> None:
    """They wait inside SGLang behind running requests, and the prefix cache of the old version holds their prompt."""
    prompt = tuple(range(2, 60))
    await served.answer(prompt, Sampling(max_tokens=2))
    running = [served.chunks((4, 5, last), ENDLESS) for last in (2, 3)]
    firsts = [await anext(chunks) for chunks in running]
    waiting = [asyncio.ensure_future(served.answer(prompt, Sampling(max_tokens=6))) for _ in range(5)]
    await until_logged(requests_log, "/generate", 8)
    await hold_decoding(served.engine)
    version = await push(served)
    for chunks, first in zip(running, firsts, strict=True):
        answer = Answer.of((), [first, *[chunk async for chunk in chunks]])
        assert answer.versions[0] == version - 1
    for answer in await asyncio.gather(*waiting):
        assert set(answer.versions) == {version}
        assert_log_probs(served.model, answer)
    sent = [json.loads(line) for line in requests_log.read_text().splitlines()]
    assert {entry["path"] for entry in sent} == PATHS
    prompts = [tuple(entry["body"]["input_ids"]) for entry in sent if entry["path"] == "/generate"]
    assert prompts.count(prompt) > 6, "some were submitted twice"
    rids = [entry["body"]["rid"] for entry in sent if entry["path"] == "/generate"]
    assert len(set(rids)) == len(rids) and len({len(rid) for rid in rids}) == 1, "ids are aborted by prefix"


async def until_logged(log: Path, path: str, count: int) -> None:
    async with asyncio.timeout(60):
        while not log.exists() or log.read_text().count(f'"path": "{path}"') < count:
            await asyncio.sleep(0.01)


async def test_a_streamed_request_is_held_back_from_the_flip_to_its_end(served: Served) -> None:
    prompt = (4, 5, 2)
    chunks = served.chunks(prompt, ENDLESS)
    got = [await anext(chunks), await anext(chunks)]
    await hold_decoding(served.engine)
    version = await push(served)
    (last,) = [chunk async for chunk in chunks]
    assert {segment.policy_version for chunk in got for segment in chunk.segments} == {version - 1}
    assert last.segments[-1].policy_version == version
    answer = Answer.of(prompt, [*got, last])
    assert list(answer.versions) == sorted(answer.versions)


async def test_the_key_is_needed_and_is_on_no_command_line(served: Served) -> None:
    command = child_of(os.getpid()).cmdline()
    assert "--api-key" not in command and command[command.index("--host") + 1] == "127.0.0.1"
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{command[command.index('--port') + 1]}") as client:
        for key in ("", "Bearer wrong"):
            body, headers = {"mode": "in_place"}, {"Authorization": key}
            answer = await client.post("/pause_generation", json=body, headers=headers)
            assert answer.status_code == 401
    await served.check_serves(served.engine.policy_version)


async def test_metrics_of_sglang_pass_through(served: Served) -> None:
    text = await asyncio.to_thread(lambda: generate_latest(REGISTRY).decode())
    assert 'sglang:num_running_reqs{model_name="tiny"} 0.0' in text
    assert text.count("# TYPE python_info gauge") == 1, "only SGLang's own metrics pass through"


@pytest.mark.long
async def test_stop_ends_all_that_sglang_started_and_held_requests_too(tmp_path: Path, helper: Path) -> None:
    async with serving(tmp_path / "model") as served:
        streamed = served.chunks((3, 4, 6), LONG)
        first = await anext(streamed)
        await hold_decoding(served.engine)
        held = asyncio.ensure_future(served.answer((3, 4, 5), LONG))
        await until_submitted(served.engine, 2)
        assert served.engine.stats().waiting_requests == 1
        child, pid = child_of(os.getpid()), int(helper.read_text())
        assert is_running(pid)
        num_exposed = await asyncio.to_thread(count_metrics)
        await served.engine.stop()
        rest = [chunk async for chunk in streamed]
        assert Answer.of((3, 4, 6), [first, *rest]).finish_reason == "aborted"
        assert (await held).finish_reason == "aborted"
    await until_gone(child.pid, pid)
    assert await asyncio.to_thread(count_metrics) == num_exposed - 1


@pytest.mark.long
async def test_a_killed_server_leaves_no_sglang(tmp_path: Path, helper: Path) -> None:
    make_tiny_qwen2(tmp_path / "model", seed=0)
    server = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert await asyncio.to_thread(server.stdout.readline) == "ready\n"
        child, pid = child_of(server.pid), int(helper.read_text())
    finally:
        server.kill()
        server.communicate()
    await until_gone(child.pid, pid)


async def is_healthy(engine: SglangEngine) -> bool:
    try:
        await engine.check_health()
    except Unavailable:
        return False
    return True


@pytest.mark.long
async def test_a_server_that_answers_nothing_counts_as_lost(
    tmp_path: Path, fault: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_calls, "POLL_TIMEOUT_S", 0.2)
    async with serving(tmp_path / "model") as served:
        fault.write_text("silent")
        async with asyncio.timeout(60):
            while await is_healthy(served.engine):
                await asyncio.sleep(0.05)
        with pytest.raises(Unavailable, match="does not answer"):
            await served.engine.check_health()


@pytest.mark.long
async def test_a_stopped_process_of_sglang_counts_as_lost(tmp_path: Path) -> None:
    async with serving(tmp_path / "model") as served:
        child = child_of(os.getpid())
        child.suspend()
        async with asyncio.timeout(60):
            while await is_healthy(served.engine):
                await asyncio.sleep(0.05)
        with pytest.raises(Unavailable, match=f"its process {child.pid} is stopped"):
            await served.engine.check_health()
    await until_gone(child.pid)


@pytest.mark.parametrize("word", ["update_fails", pytest.param("die_on_update", marks=pytest.mark.long)])
async def test_a_load_that_fails_gives_the_engine_up(tmp_path: Path, fault: Path, word: str) -> None:
    """After a failed load the weights are unknown, because SGLang does not restore the previous ones."""
    async with serving(tmp_path / "model") as served:
        await push(served)
        fault.write_text(word)
        version = served.engine.policy_version
        with pytest.raises(WeightPushFailed, match=f"loading version {version + 1} failed"):
            await push(served)
        assert served.engine.policy_version == version
        with pytest.raises(Unavailable):
            await served.engine.check_health()
        with pytest.raises(Unavailable):
            await served.answer((3, 4), Sampling(max_tokens=2))


@pytest.mark.long
async def test_a_version_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_VERSION", "0.5.20.post1")
    with pytest.raises(ConfigError, match="SGLang 0.5.20.post1 cannot take new weights"):
        async with serving(tmp_path / "model"):
            pass


async def test_flags_that_sglang_does_not_know_end_the_start(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="ended with code 1 while it started"):
        async with serving(tmp_path / "model", extra={"no_such_thing": 3}):
            pass


@pytest.mark.long
async def test_without_determinism_seeds_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path / "model", extra={"enable_deterministic_inference": False}) as served:
        with pytest.raises(InvalidInput, match="seed"):
            await served.answer((3, 4), Sampling(max_tokens=2, seed=1))
        answers = await asyncio.gather(*(served.answer((3, 4), Sampling(max_tokens=12)) for _ in range(8)))
        assert len({answer.token_ids for answer in answers}) > 1


async def test_an_id_can_run_once_at_a_time(served: Served) -> None:
    request = GenerateRequest("same", (3, 4), LONG, stream=True)
    first = served.engine.generate(request)
    await anext(first)
    with pytest.raises(InvalidInput, match="is running already"):
        await anext(served.engine.generate(request))
    await first.aclose()  # type: ignore[attr-defined]
    again = served.engine.generate(request)
    await anext(again)
    await again.aclose()  # type: ignore[attr-defined]


async def test_death_of_sglang_ends_its_requests_and_is_noticed(served: Served) -> None:
    """The last test, because it ends the engine of the others."""
    stand_in = child_of(os.getpid())
    silent = asyncio.ensure_future(served.answer((4, 5, 2), ENDLESS))
    streamed = served.chunks((4, 5, 3), ENDLESS)
    await anext(streamed)
    stand_in.kill()
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable):
            [chunk async for chunk in streamed]
        with pytest.raises(Unavailable):
            await silent
        while await is_healthy(served.engine):
            await asyncio.sleep(0.05)
    with pytest.raises(Unavailable):
        await served.answer((3,), LONG)
