"""Concurrent clients record every call while Redis and the gateway are killed: some order must explain all answers.

The short run is part of `make test`, the others of `make chaos`. PENSTOCK_LINEARIZABILITY_SEEDS=4,5 sets their seeds.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from penstock.errors import PenstockError
from penstock.store.redis_client import Script, ScriptFolder
from support.linearizability.recorded_run import CALLS, Plan, RecordedRun, Recorder
from support.linearizability.recorded_tasks import CALLS as TASK_CALLS
from support.linearizability.recorded_tasks import RecordedTasks

SEEDS = [int(seed) for seed in os.environ.get("PENSTOCK_LINEARIZABILITY_SEEDS", "1,2,3").split(",")]


async def check(folder: Path, plan: Plan) -> None:
    async with RecordedRun(folder, plan) as run:
        history = await run.run()
    calls = Counter(call.name for call, _ in history.calls)
    print(f"\n{plan}: {calls.total()} calls on {len(run.recorder.names)} prompts, {run.recorder.num_lost} answers lost")
    print(", ".join(f"{count} {name}" for name, count in calls.most_common()))
    tasks = run.tasks.history
    names = Counter(call.name for calls_of_one in tasks.calls.values() for call in calls_of_one)
    print(f"{names.total()} calls on {len(run.tasks.owners)} tasks and their sessions, and on sessions of their own")
    problems = history.problems() + tasks.problems()
    assert not problems, f"{plan}: {len(problems)} parts of the history are wrong:\n" + "\n".join(problems[:3])
    assert run.num_poisoned > 0 and calls.keys() >= CALLS


@pytest.mark.timeout(600)
async def test_a_short_history_is_linearizable(tmp_path: Path) -> None:
    await check(tmp_path, Plan(seed=7, duration_s=3.0, redis_kills=1, gateway_kills=0))


@pytest.mark.fault_row(
    "whole run", "linearizability, seed {seed}",
    how="clients submit, repeat, cancel, requeue, lease, append, take and commit, and submit, lease and reward tasks "
    "and sessions, while the gateway is killed twice and Redis four times; some submissions fail inside their script",
    must="one order of all calls explains every answer; a lost answer may have been executed or not",
)  # fmt: skip
@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_history_is_linearizable(tmp_path: Path, seed: int, record_property: Any) -> None:
    await check(tmp_path, Plan(seed, duration_s=25.0, redis_kills=4, gateway_kills=2))
    record_property("fault", {"lost": 0, "doubled": 0})


TASK_MUTANTS = {
    "none": ("", "", ""),
    "a place is given back without its lease": (
        "return_task", "if not task then return 0 end", "if not task then task, place = place_of(ARGV[1]) end"
    ),
    "a lease that another session holds is renewed": (
        "heartbeat_tasks",
        "if session == task .. '.' .. place .. '.' .. attempt then return task, place end",
        "return task, place",
    ),
    "a stranger may close a session": (
        "close_session", "if not may_use(owner, ARGV[6], ARGV[7]) then return {'missing', ''} end", ""
    ),
    "the second reward counts": ("close_session", "if reward then return {'closed', reward} end", ""),
    "a session of two groups": (
        "finish_sessions", "answer = redis.call('HGET', state_key(ARGV[4]), 'answer') or answer", "answer = answer"
    ),
    "a repeated key stores again": ("submit_tasks", "return {1, known.ids}", "return {0, known.ids}"),
}  # fmt: skip
"""A script, a part of its text, and what stands there instead."""
QUEUE_MUTANTS = {
    "none": ("", "", ""),
    "a key is stored before its prompts": (
        "submit", "new_keys[name] = {key, owner, first, n, digest}",
        "redis.call('HSET', IDEMPOTENCY .. key, 'of:' .. owner, first .. ' ' .. n .. ' ' .. digest)",
    ),
    "a learner commits after its term": ("commit", "if fenced then return fenced end", ""),
}  # fmt: skip
MAX_ROUNDS = 20


def cases(mutants: dict[str, tuple[str, str, str]], shown: str) -> list[Any]:
    """No fault and one wrong script; `make test-long` has the others."""
    return [name if name in ("none", shown) else pytest.param(name, marks=pytest.mark.long) for name in mutants]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", cases(QUEUE_MUTANTS, "a key is stored before its prompts"))
async def test_a_history_of_the_queue_shows_a_wrong_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    change_script(monkeypatch, *QUEUE_MUTANTS[mutant])
    rounds, problems = 1 if mutant == "none" else MAX_ROUNDS, list[str]()
    while rounds > 0 and not problems:
        plan = Plan(seed=rounds, duration_s=1.0, redis_kills=0, gateway_kills=0, is_gateway_inside=True)
        async with RecordedRun(tmp_path / str(rounds), plan) as run:
            problems = (await run.run()).problems()
        rounds -= 1
    assert bool(problems) == (mutant != "none"), "\n".join(problems[:2])


def change_script(monkeypatch: pytest.MonkeyPatch, changed: str, right: str, wrong: str) -> None:
    """Let this process load a script in which `wrong` stands instead of `right`."""
    load = ScriptFolder.load

    def load_mutant(folder: ScriptFolder, name: str) -> Script:
        script = load(folder, name)
        if name != changed:
            return script
        assert script.text.count(right) == 1, script.text
        text = script.text.replace(right, wrong)
        return Script(text, hashlib.sha1(text.encode()).hexdigest())

    monkeypatch.setattr(ScriptFolder, "load", load_mutant)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", cases(TASK_MUTANTS, "the second reward counts"))
async def test_a_history_of_tasks_shows_a_wrong_script(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    """Without a fault there is no problem, and the history of each wrong script is rejected."""
    change_script(monkeypatch, *TASK_MUTANTS[mutant])
    rounds = 1 if mutant == "none" else MAX_ROUNDS  # a slow machine makes few calls in a round
    problems: list[str] = []
    while rounds > 0 and not problems:
        await redis_client.flushdb()
        problems = await problems_of_tasks(redis_client, f"{mutant}/{rounds}")
        rounds -= 1
    assert bool(problems) == (mutant != "none"), "\n".join(problems[:2])


async def problems_of_tasks(client: redis.Redis, seed: str) -> list[str]:
    """Record calls on tasks and sessions for a while, without faults, and check them."""
    is_up, recorder = asyncio.Event(), Recorder()
    is_up.set()

    async def may_go_on() -> bool:
        return recorder.now_s() < 1.5 or not tasks.called >= TASK_CALLS

    tasks = RecordedTasks(client, recorder, may_go_on, is_up)
    failures: list[str] = []
    try:
        async with asyncio.TaskGroup() as clients:
            for number, act in enumerate(tasks.clients):
                clients.create_task(act(f"client-{number}", random.Random(f"{seed}/{number}")))
        await tasks.end()
    except* PenstockError as group:  # a wrong script may fail, instead of answering
        failures = [str(error) for error in group.exceptions]
    return tasks.problems() + failures
