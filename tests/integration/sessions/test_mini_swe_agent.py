"""mini-swe-agent from PyPI, unchanged, through a gateway: examples/mini_swe_agent."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateways import Gateway
from penstock.client import PenstockClient
from penstock.codec import decode_group
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.trajectory import VersionSegment
from penstock_rollout.engines.engine import GenerateRequest, TokenChunk
from scripted_engine import END, called

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("PENSTOCK_MINI_SWE_AGENT_PYTHON", sys.executable)
"""A Python with mini-swe-agent. Its litellm wants other versions than ours, so it has an environment of its own."""
REPAIR = "echo 'def total(numbers): return sum(numbers)' > tally.py"
DEADLINE_S = 120
NUM_FIRST_MESSAGES = 3
"""Tools, system message and task."""
TURNS = [
    called(json.dumps({"name": "bash", "arguments": {"command": command}}))
    for command in ("cat tally.py", REPAIR, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
]


def has_mini_swe_agent() -> bool:
    return subprocess.run([PYTHON, "-c", "import minisweagent"], capture_output=True, check=False).returncode == 0


class RepairingModel:
    """Repairs the first task, one command a turn. The number of turns that ended before tells it where it is."""

    policy_version = 3
    name = "talking"

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        turn = (list(request.prompt_token_ids).count(END) - NUM_FIRST_MESSAGES) // 2
        ids = TURNS[turn]
        log_probs = tuple(-(turn + 1 + place / 1024) for place in range(len(ids)))
        yield TokenChunk(ids, log_probs, (VersionSegment(0, len(ids), self.policy_version),), "stop")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap, for the agent's commands")
async def test_it_repairs_a_repository_and_every_turn_is_trained(
    talking: tuple[Gateway, dict[str, Any]], queue: RedisReplayQueue, tmp_path: Path
) -> None:
    if not await asyncio.to_thread(has_mini_swe_agent):
        pytest.skip("needs mini-swe-agent; set PENSTOCK_MINI_SWE_AGENT_PYTHON to a Python that has it")
    gateway, engines = talking
    for engine in engines.values():
        engine.generate = RepairingModel().generate
    task = json.loads((ROOT / "examples/mini_swe_agent/tasks.jsonl").read_text().splitlines()[0])
    async with PenstockClient(gateway.url, api_key=gateway.key) as client:
        [task_id] = await client.submit_tasks([task], num_sessions=2)
        output = tmp_path / "worker.log"
        with output.open("w") as log:
            worker = await asyncio.create_subprocess_exec(
                PYTHON, "examples/mini_swe_agent/worker.py", "--url", gateway.url, "--idle-s", "1", cwd=ROOT,
                env=os.environ | {"PENSTOCK_API_KEY": gateway.key, "PYTHONPATH": str(ROOT)},
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            await asyncio.wait({waiting := asyncio.create_task(worker.wait())}, timeout=DEADLINE_S)
        finally:
            if worker.returncode is None:
                worker.kill()
            await waiting
        assert "2 sessions rewarded, 0 failed, 0 lost" in output.read_text(), output.read_text()[-3000:]
        [prompt_id] = (await client.get_task(task_id)).prompt_ids
    group = decode_group(await queue.get_group(prompt_id))
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 1.0]
    for trajectory in group.trajectories:
        sampled = trajectory.token_ids[trajectory.loss_mask.astype(bool)]
        assert tuple(sampled) == tuple(token for turn in TURNS for token in turn), "exactly what was sampled"
