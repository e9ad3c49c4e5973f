"""Agents and environments from PyPI, unchanged, through a gateway: the workers of examples/."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client import PenstockClient
from penstock.codec import decode_group
from penstock.replay.queue import RedisReplayQueue
from penstock.trajectory import Trajectory, VersionSegment
from penstock_rollout.engines.engine import GenerateRequest, TokenChunk
from support.gateways import ROOT, Gateway, run_worker
from support.scripted_engines import END, called, spelled

pytestmark = pytest.mark.long
REPAIR = "echo 'def total(numbers): return sum(numbers)' > tally.py"
TURNS = [
    called(json.dumps({"name": "bash", "arguments": {"command": command}}))
    for command in ("cat tally.py", REPAIR, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
]
NUM_FIRST_MESSAGES = 3
"""Tools, system message and task."""
SIX = (*spelled("6"), END)
GRAPH = [
    called(json.dumps({"name": "transfer_to_calculator", "arguments": {}})),
    called(json.dumps({"name": "add", "arguments": {"first": 2, "second": 4}})),
    SIX,
]


async def say(ids: tuple[int, ...]) -> AsyncIterator[TokenChunk]:
    yield TokenChunk(
        ids, tuple(-(1 + place / 1024) for place in range(len(ids))), (VersionSegment(0, len(ids), 3),), "stop"
    )


def repair(request: GenerateRequest) -> AsyncIterator[TokenChunk]:
    """Repair the first task, one command a turn. The number of messages tells where the agent is."""
    return say(TURNS[(list(request.prompt_token_ids).count(END) - NUM_FIRST_MESSAGES) // 2])


def sampled(trajectory: Trajectory) -> tuple[int, ...]:
    return tuple(trajectory.token_ids[trajectory.loss_mask.astype(bool)])


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap, for the agent's commands")
async def test_mini_swe_agent_repairs_a_repository_and_every_turn_is_trained(
    talking: tuple[Gateway, dict[str, Any]], queue: RedisReplayQueue, tmp_path: Path
) -> None:
    gateway, engines = talking
    for engine in engines.values():
        engine.generate = repair
    task = json.loads((ROOT / "examples/mini_swe_agent/tasks.jsonl").read_text().splitlines()[0])
    async with PenstockClient(gateway.url, api_key=gateway.key) as client:
        [task_id] = await client.submit_tasks([task], num_sessions=2)
        script = "mini_swe_agent/worker.py"
        output = await run_worker("minisweagent", script, gateway=gateway, log=tmp_path / "worker.log")
        assert "2 sessions rewarded, 0 failed, 0 lost" in output, output[-3000:]
        [prompt_id] = (await client.get_task(task_id)).prompt_ids
    group = decode_group(await queue.get_group(prompt_id))
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 1.0]
    everything = tuple(token for turn in TURNS for token in turn)
    assert {sampled(trajectory) for trajectory in group.trajectories} == {everything}, "exactly what was sampled"


async def test_an_environment_of_verifiers_gives_the_rewards(
    talking: tuple[Gateway, dict[str, Any]], queue: RedisReplayQueue, tmp_path: Path
) -> None:
    gateway, engines = talking
    for engine in engines.values():
        engine.generate = lambda request: say(SIX)
    async with PenstockClient(gateway.url, api_key=gateway.key) as client:
        task_ids = await client.submit_tasks([0, 1], num_sessions=2)
        script = "verifiers_environment/worker.py"
        output = await run_worker("verifiers", script, "sums", gateway=gateway, log=tmp_path / "worker.log")
        assert "4 sessions rewarded, 0 failed, 0 lost" in output, output[-3000:]
        prompt_ids = [(await client.get_task(task_id)).prompt_ids[0] for task_id in task_ids]
    groups = [decode_group(await queue.get_group(prompt_id)) for prompt_id in prompt_ids]
    rewards = [[trajectory.reward for trajectory in group.trajectories] for group in groups]
    assert rewards == [[1, 1], [0, 0]], "2 + 4 is 6, and 3 + 4 is not"
    assert {sampled(trajectory) for group in groups for trajectory in group.trajectories} == {SIX}
    assert all("is_right" in trajectory.reward_parts for group in groups for trajectory in group.trajectories)


async def test_a_graph_of_agents_is_trained_in_all_its_paths(
    talking: tuple[Gateway, dict[str, Any]], queue: RedisReplayQueue, tmp_path: Path
) -> None:
    gateway, engines = talking
    num_calls = 0

    def answer(request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        nonlocal num_calls
        num_calls += 1
        return say(GRAPH[num_calls - 1])

    for engine in engines.values():
        engine.generate = answer
    async with PenstockClient(gateway.url, api_key=gateway.key) as client:
        [task_id] = await client.submit_tasks([{"question": "2 + 4?", "answer": "6"}], num_sessions=1)
        script = "openai_agents/worker.py"
        output = await run_worker("agents", script, gateway=gateway, log=tmp_path / "worker.log")
        assert "1 sessions rewarded, 0 failed, 0 lost" in output, output[-3000:]
        [prompt_id] = (await client.get_task(task_id)).prompt_ids
    group = decode_group(await queue.get_group(prompt_id))
    assert {trajectory.reward for trajectory in group.trajectories} == {1.0}
    trained = sorted(token for trajectory in group.trajectories for token in sampled(trajectory))
    assert trained == sorted(token for turn in GRAPH for token in turn), "each turn is trained once"
