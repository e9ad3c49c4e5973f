"""The scorer with real processes: deadlines, deaths and exceptions fail one reward and leave the others alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client import CollectorRegistry

from penstock.config.rollout import RemoteReward, RewardConfig
from penstock.errors import ConfigError
from penstock.store.notices import Event, PostEvent, ignore_event
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards import pool
from penstock_rollout.rewards.pool import RewardFailed, RewardProcess
from penstock_rollout.rewards.scorer import RemoteScorer, Scorer
from support.confinements import needs_sandbox
from support.processes import command_of

FUNCTIONS = '''
from __future__ import annotations
import asyncio, ctypes, os, signal, sys, time
from dataclasses import dataclass

@dataclass
class Graded:  # dataclasses look their module up by name in sys.modules
    score: float

def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Does what the response says."""
    verb, _, rest = solution_str.partition(" ")
    if verb == "sleep":
        time.sleep(float(rest))
        return 1.0
    if verb == "touch":
        open(rest, "w").close()
        time.sleep(60)
    if verb == "hang":  # in C, with signals blocked: only SIGKILL ends it
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ctypes.CDLL(None).sleep(999)
    if verb == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if verb == "die-once" and not os.path.exists(rest):
        open(rest, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if verb == "exit":
        sys.exit(3)
    if verb == "raise":
        raise ValueError(rest)
    if verb == "print":
        print("noise on standard output", flush=True)
        os.write(1, b"raw noise")
        return 0.5
    if verb == "read":
        return float(sys.stdin.read() == "")
    if verb == "nan":
        return float("nan")
    if verb == "huge":
        return 1e300
    if verb == "heavy":
        return float(any(name in sys.modules for name in ("torch", "transformers", "vllm", "numpy", "pydantic")))
    if verb == "pid":
        return {"score": 1.0, "pid": os.getpid()}
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "pred": solution_str,
            "index": extra_info["index"]}

async def later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return 0.75

def together(data_sources, solution_strs, ground_truths, extra_infos, top=1.0):
    """The longest response of a prompt is the best one."""
    if "raise" in solution_strs:
        raise ValueError("all fail")
    if "short" in solution_strs:
        return [0.0]
    longest = max(map(len, solution_strs))
    return [{"score": top * (len(text) == longest), "pred": text} for text in solution_strs]

class Counting:
    """Counts its calls, as a class with state may."""
    def __init__(self, start):
        self.calls = start
    def __call__(self, data_source, solution_str, ground_truth, extra_info):
        self.calls += 1
        return float(self.calls)

def swapped(solution_str, ground_truth, scale, *, extra_info=None, data_source=None, **others):
    return Graded(scale * (solution_str == ground_truth) * (data_source == "any") + others["bonus"]).score
'''

TIMEOUT_S = 60.0
"""For everything that is to happen. On a busy machine even a fast reward may take seconds."""
SAMPLES_TOGETHER = range(4)
ENDLESS = ("hang", "sleep 60")
MakeScorer = Callable[..., Awaitable[Scorer]]


@pytest.fixture
async def make_scorer(tmp_path: Path) -> AsyncIterator[MakeScorer]:
    scorers: list[Scorer] = []
    (tmp_path / "reward.py").write_text(FUNCTIONS)

    async def make(post: PostEvent = ignore_event, **fields: Any) -> Scorer:
        usual = {"function_file": tmp_path / "reward.py", "num_processes": 2, "timeout_s": TIMEOUT_S}
        config = RewardConfig.model_validate(usual | fields)
        scorers.append(Scorer(config, RolloutMetrics(CollectorRegistry()), post))
        return scorers[-1]

    yield make
    for scorer in scorers:
        await scorer.close()


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The deadlines of all messages with samples. They hold for samples that never end: a busy machine could make a
    healthy one miss a short deadline too."""
    ask, found = RewardProcess.ask, list[float]()

    async def ask_patiently(self: RewardProcess, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if request["calls"]:
            found.append(timeout_s)
        is_endless = any(call["solution_str"] in ENDLESS for call in request["calls"])
        return await ask(self, request, timeout_s if is_endless else max(timeout_s, TIMEOUT_S))

    monkeypatch.setattr(RewardProcess, "ask", ask_patiently)
    return found


async def score(scorer: Scorer, *responses: str, ground_truth: Any = "7") -> list[tuple[float, dict[str, float]]]:
    scores = await scorer.score("prompt 17", "any", list(responses), ground_truth, {"index": 3})
    return [(score.reward, score.parts) for score in scores]


def errors(scorer: Scorer) -> dict[str, float]:
    [metric] = scorer.metrics.reward_errors.collect()
    return {s.labels["kind"]: s.value for s in metric.samples if s.name.endswith("_total") and s.value}


async def test_a_custom_function_gets_verls_arguments_and_its_parts_are_kept(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer()
    await scorer.check()
    assert await score(scorer, "7", "8!") == [
        (1.0, {"score": 1.0, "length": 1.0, "index": 3.0}),
        (0.0, {"score": 0.0, "length": 2.0, "index": 3.0}),
    ]
    assert errors(scorer) == {}


async def test_arguments_are_passed_by_name_so_their_order_does_not_matter(make_scorer: MakeScorer) -> None:
    """verl does the same, and passes its reward_kwargs too."""
    scorer = await make_scorer(function_name="swapped", function_kwargs={"scale": 2, "bonus": 0.5})
    await scorer.check()
    assert await score(scorer, "7", "8") == [(2.5, {}), (0.5, {})]


async def test_a_batch_function_scores_all_samples_of_a_prompt_in_one_call(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer(function_name="together", function_batch=True, function_kwargs={"top": 2.0})
    await scorer.check()
    scores = await scorer.score("prompt 17", "any", ["a", "abc", "ab"], "7", {})
    assert [(one.reward, one.answer) for one in scores] == [(0.0, "a"), (2.0, "abc"), (0.0, "ab")]
    assert [reward for reward, _ in await score(scorer, "a", "raise")] == [0.0, 0.0]
    assert [reward for reward, _ in await score(scorer, "a", "short")] == [0.0, 0.0]
    assert errors(scorer) == {"exception": 4.0}


async def test_a_class_is_made_once_in_each_process_and_called(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer(function_name="Counting", function_kwargs={"start": 10}, num_processes=1)
    await scorer.check()
    assert sorted(reward for reward, _ in await score(scorer, "a", "b", "c")) == [11.0, 12.0, 13.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"function_name": "compute_score", "function_batch": True},
            "cannot be called with data_sources, solution_strs",
        ),
        ({"function_name": "Counting"}, "cannot be called with no arguments by name"),
        ({"function_name": "Graded", "function_kwargs": {"score": 1}}, "objects of Graded cannot be called"),
    ],
)
async def test_a_function_of_the_wrong_form_is_refused(
    make_scorer: MakeScorer, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await (await make_scorer(**fields)).check()


async def test_the_reward_of_a_reward_model_is_zero_here_and_needs_no_process(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer(by_data_source={"any": {"kind": "reward_model"}})
    await scorer.check()
    assert await score(scorer, "7", "8") == [(0.0, {}), (0.0, {})]
    assert errors(scorer) == {}


async def test_processes_stay_light_and_are_used_again(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer(num_processes=1)
    pids = {(await score(scorer, "pid"))[0][1]["pid"] for _ in range(3)}
    assert len(pids) == 1 and pids != {os.getpid()}
    assert await score(scorer, "heavy") == [(0.0, {})]


async def test_what_functions_print_or_read_does_not_disturb(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer()
    assert await score(scorer, "print", "read") == [(0.5, {}), (1.0, {})]


async def test_coroutine_functions_are_run(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer(function_name="later")
    assert await score(scorer, "x") == [(0.75, {})]


async def test_failures_are_counted_by_kind_and_give_the_configured_value(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer(error_value=-1.0)
    assert await score(scorer, "raise oops", "nan", "die", "exit", "7") == [
        (-1.0, {}), (-1.0, {}), (-1.0, {}), (-1.0, {}), (1.0, {"score": 1.0, "length": 1.0, "index": 3.0}),
    ]  # fmt: skip
    assert errors(scorer) == {"exception": 2, "worker_died": 2}


async def test_a_sample_whose_process_died_is_scored_once_more(make_scorer: MakeScorer, tmp_path: Path) -> None:
    scorer = await make_scorer(num_processes=1)
    died = tmp_path / "died"
    assert await score(scorer, f"die-once {died}") == [
        (0.0, {"score": 0.0, "length": float(len(f"die-once {died}")), "index": 3.0})
    ]
    assert died.exists() and errors(scorer) == {}


async def test_samples_with_a_fast_reward_go_to_a_process_together(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer(num_processes=2)
    assert len(set(await _pids(scorer, 8))) == 2, "nothing is known of the reward yet, so both processes are used"
    async with asyncio.timeout(TIMEOUT_S):
        while len(set(await _pids(scorer, 8))) > 1:  # until the mean is below the bound, on a busy machine too
            pass
    await score(scorer, *["sleep 0.2"] * 8)
    assert len(set(await _pids(scorer, 8))) == 2, "a slow reward is computed in all processes at the same time"


@pytest.mark.parametrize(("verb", "kind"), [("die", "worker_died"), ("hang", "timeout"), ("raise oops", "exception")])
async def test_a_sample_that_fails_leaves_the_others_alone(
    make_scorer: MakeScorer, deadlines: list[float], verb: str, kind: str
) -> None:
    scorer = await make_scorer(num_processes=1, timeout_s=2.0)
    await _score_until_fast(scorer)
    rewards = [reward for reward, _ in await score(scorer, "7", verb, "7", "8")]
    assert rewards == [1.0, 0.0, 1.0, 0.0]
    assert errors(scorer) == {kind: 1}
    assert set(deadlines) == {2.0}


async def _score_until_fast(scorer: Scorer) -> None:
    """Score samples until four of them go together."""
    settings = scorer.choice.settings_json(scorer.choice.reward_for("any"))
    async with asyncio.timeout(TIMEOUT_S):
        while len(scorer._pool._pace.parts(settings, SAMPLES_TOGETHER)) > 1:
            await score(scorer, "7")


async def _pids(scorer: Scorer, num_samples: int) -> list[float]:
    return [parts["pid"] for _, parts in await score(scorer, *["pid"] * num_samples)]


async def test_users_are_told_of_failures_once_per_place_with_the_traceback(
    make_scorer: MakeScorer, tmp_path: Path
) -> None:
    events: list[Event] = []
    scorer = await make_scorer(post=events.append)
    responses = ["raise one", "raise two", "nan", "die", "7"]
    scores = await scorer.score("prompt 17", "any", responses, "7", {"index": 3})
    assert [score.failed for score in scores] == [True, True, True, True, False]
    assert {event.kind for event in events} == {"reward_failed"} and len(events) == 4
    assert len({event.key for event in events}) == 3, "the same line fails with the same key, whatever the message"
    [raised] = [event for event in events if "raise" not in event.text and "one" in event.text]
    assert "sample 0 of prompt 17, data source 'any', failed (exception): ValueError: one" in raised.text
    assert raised.detail.startswith("Traceback") and raised.detail.rstrip().endswith("ValueError: one")
    assert f'File "{tmp_path / "reward.py"}"' in raised.detail and "pool.py" not in raised.detail
    [wrong] = [event for event in events if "returned nan" in event.text]
    assert wrong.detail == "", "a wrong result has no traceback that would lead to the function"


async def test_users_are_told_of_a_data_source_that_falls_back_to_the_default(make_scorer: MakeScorer) -> None:
    events: list[Event] = []
    scorer = await make_scorer(post=events.append, function_file=None)
    for _ in range(2):
        await scorer.score("prompt 1", "mine", ["7"], "7", {})
        await scorer.score("prompt 1", "openai/gsm8k", ["#### 7"], "7", {})
    [event] = events
    assert event.kind == "default_reward"
    assert "unknown data source 'mine'" in event.text and "(exact_match)" in event.text


async def test_a_failed_reward_names_its_prompt_and_sample(
    make_scorer: MakeScorer, caplog: pytest.LogCaptureFixture
) -> None:
    scorer = await make_scorer()
    assert await score(scorer, "7", "raise oops", "huge") == [
        (1.0, {"score": 1.0, "length": 1.0, "index": 3.0}), (0.0, {}), (0.0, {}),
    ]  # fmt: skip
    first, second = sorted(record.getMessage() for record in caplog.records if record.name.endswith("scorer"))
    assert first.startswith("the reward of sample 1 of prompt 17, data source 'any', failed (exception): ")
    assert (
        second.startswith("the reward of sample 2 of prompt 17") and "1e+300, which is not a number between" in second
    )


async def test_arguments_that_json_cannot_hold_are_a_failed_reward(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer()
    assert await score(scorer, "7", ground_truth=b"7") == [(0.0, {})]
    assert errors(scorer) == {"exception": 1}


@pytest.mark.parametrize("verb", ["sleep 60", "hang"])
async def test_a_deadline_ends_the_reward_and_no_other(
    make_scorer: MakeScorer, deadlines: list[float], verb: str
) -> None:
    scorer = await make_scorer(timeout_s=3.0)
    await score(scorer, "7", "7")
    slow, *others = await score(scorer, verb, "sleep 0.3", "sleep 0.3", "7")
    assert slow == (0.0, {}) and [reward for reward, _ in others] == [1.0, 1.0, 1.0]
    assert errors(scorer) == {"timeout": 1} and set(deadlines) == {3.0}
    await scorer.close()
    await _until(lambda: not _has_workers())


async def test_the_deadline_does_not_include_waiting_for_a_process(
    make_scorer: MakeScorer, deadlines: list[float]
) -> None:
    scorer = await make_scorer(num_processes=1, timeout_s=2.0)
    results = await score(scorer, *["sleep 0.5"] * 8)
    assert [reward for reward, _ in results] == [1.0] * 8 and errors(scorer) == {}
    assert deadlines == [2.0] * 8


async def test_cancelling_ends_the_process(make_scorer: MakeScorer, tmp_path: Path) -> None:
    scorer = await make_scorer(num_processes=1)
    await scorer.check()
    started = tmp_path / "started"
    task = asyncio.create_task(score(scorer, f"touch {started}"))
    await _until(started.exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await score(scorer, "7"))[0][0] == 1.0
    assert errors(scorer) == {}


async def test_an_idle_process_that_was_killed_is_replaced(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer(num_processes=1)
    pid = int((await score(scorer, "pid"))[0][1]["pid"])
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(TIMEOUT_S):
        await scorer._pool._idle[0].process.wait()
    assert (await score(scorer, "7"))[0][0] == 1.0 and errors(scorer) == {}


@needs_sandbox
async def test_ending_a_code_reward_ends_its_programs(make_scorer: MakeScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gives up long before the reward's own deadline."""
    monkeypatch.setattr(pool, "TERMINATE_S", TIMEOUT_S)  # a busy machine may need longer to end the programs
    word = f"997.{os.getpid()}"  # no other process of this machine sleeps this long
    scorer = await make_scorer(function_file=None, default={"kind": "code", "test_timeout_s": 60, "timeout_s": 90})
    program = f"import os\nos.fork()\nos.fork()\nos.execv('/bin/sleep', ['sleep', '{word}'])"
    task = asyncio.create_task(scorer.score("prompt 17", "any", [program], {"inputs": [""], "outputs": [""]}, {}))
    await _until(lambda: _processes_with(word))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await scorer.close()
    await _until(lambda: not _processes_with(word))


async def test_a_reward_that_cannot_work_is_refused_at_the_start(make_scorer: MakeScorer, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    for fields, message in (
        ({"function_file": tmp_path / "absent.py"}, "there is no file .*absent.py"),
        ({"function_file": tmp_path / "broken.py"}, "broken.py fails on import.*nothing_of_this_name"),
        ({"function_name": "other"}, "has no 'other'"),
        (
            {"function_name": "swapped", "function_kwargs": {"bonus": 1}},
            "by name: missing.*'scale'",
        ),
        ({"by_data_source": {"x": {"kind": "function", "file": "absent.py"}}}, "there is no file absent.py"),
        ({"default": {"kind": "remote", "url": "http://x", "api_key_file": "absent"}}, "absent cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            await (await make_scorer(**fields)).check()


# ── remote ──


def remote(handler: Callable[[httpx.Request], httpx.Response], **fields: Any) -> RemoteScorer:
    reward = RemoteReward(kind="remote", url="http://judge/score", **fields)
    return RemoteScorer(reward, httpx.MockTransport(handler))


async def test_a_remote_reward_is_posted_and_repeated(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k3y\n")
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if len(seen) == 1:
            raise httpx.ConnectError("refused")
        if len(seen) < 4:
            return httpx.Response(503 if len(seen) == 2 else 429)
        return httpx.Response(200, json={"score": 0.5, "quality": 2})

    scorer = remote(handler, api_key_file=tmp_path / "key")
    arguments = {"data_source": "d", "solution_str": "s", "ground_truth": [1], "extra_info": {"a": 1}}
    assert (await scorer.compute(arguments, 30))[:2] == (0.5, {"score": 0.5, "quality": 2.0})
    assert len(seen) == 4 and json.loads(seen[-1].content) == arguments
    assert seen[-1].headers["Authorization"] == "Bearer k3y"
    await scorer.close()


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        (httpx.Response(400, text="no such field"), "exception", "answered 400: 'no such field'"),
        (httpx.Response(200, text="fine"), "exception", "answered 'fine'"),
        (httpx.Response(200, json={"reward": 1}), "exception", "without `score`"),
        (httpx.Response(500), "timeout", r"gave no score within 0.5 s \(status 500\)"),
    ],
)
async def test_remote_failures(response: httpx.Response, kind: str, message: str) -> None:
    scorer = remote(lambda request: response)
    with pytest.raises(RewardFailed, match=message) as caught:
        await scorer.compute({"data_source": "d"}, 0.5)
    assert caught.value.kind == kind
    await scorer.close()


async def test_remote_rewards_over_a_real_connection(make_scorer: MakeScorer) -> None:
    """The service closes the first connection without a reply."""
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-len"))
        request = json.loads(await reader.readexactly(length))
        if num_connections > 1:
            body = json.dumps(float(request["solution_str"] == request["ground_truth"])).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body))
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/score"
        scorer = await make_scorer(by_data_source={"any": {"kind": "remote", "url": url}})
        assert [reward for reward, _ in await score(scorer, "7", "8", "7")] == [1.0, 0.0, 1.0]
        assert errors(scorer) == {}


def _processes_with(word: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _has_workers() -> bool:
    return any("rewards.pool" in " ".join(command_of(child)) for child in psutil.Process().children())


async def _until(found: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not found():
            await asyncio.sleep(0.02)


@needs_sandbox
async def test_the_confinement_of_code_is_logged_once(
    make_scorer: MakeScorer, caplog: pytest.LogCaptureFixture
) -> None:
    scorer = await make_scorer(function_file=None, default={"kind": "code"}, num_processes=2)
    with caplog.at_level("INFO"):
        await scorer.check()
        await scorer.score("prompt 1", "any", ["print(1)"] * 4, {"inputs": [""], "outputs": ["1"]}, {})
    said = [record.message for record in caplog.records if "code rewards run" in record.message]
    assert len(said) == 1 and "confined by" in said[0]
