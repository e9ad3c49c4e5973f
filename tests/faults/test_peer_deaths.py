"""A group uses rows of two servers, and the one that only lends them is killed: nothing is lost, and nothing twice."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.codec import decode_group, encode_prompt
from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.fleet import Fleet, ServerRecord
from penstock.store.redis_client import connect
from penstock.trajectory import Prompt, Sampling
from support.answers import Answer
from support.fleet_runs import Part, counters, start_server
from support.redis_server import RedisProcess
from support.served_engines import TOLERANCE, expected_log_probs, load_model
from support.tiny_models import make_tiny_qwen2

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
ROWS, NUM_SAMPLES, MAX_TOKENS = 4, 8, 600
WAIT_S = 240.0


@pytest.fixture
def config(tmp_path: Path, redis_process: RedisProcess) -> RunConfig:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    return validate(
        {
            "run": f"peers-{tmp_path.name.lower()}",
            "run_dir": str(tmp_path),
            "model": {"path": str(make_tiny_qwen2(tmp_path / "model", seed=0))},
            "redis": {"url": redis_process.url},
            "replay": {"groups_per_step": 1, "lease_ttl_s": 10},
            "rollout": {
                "spread_groups": True,
                "engine": {"name": "torch", "max_model_len": 1000, "max_num_seqs": ROWS},
                "reward": {"function_file": str(reward)},
            },
        },
        "test",
    )


@pytest.fixture
def parts() -> Iterator[list[Part]]:
    started: list[Part] = []
    yield started
    for part in started:
        part.end()


async def until(fleet: Fleet, found: Callable[[list[ServerRecord]], bool], parts: list[Part]) -> list[ServerRecord]:
    """Poll the fleet's reports."""
    deadline = time.monotonic() + WAIT_S
    while not found(servers := await fleet.servers()):
        assert time.monotonic() < deadline, (servers, [part.output()[-1000:] for part in parts])
        await asyncio.sleep(0.02)
    return servers


def lends_rows(server: ServerRecord) -> bool:
    return server.running_requests > 0 and server.running_groups == 0


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "nothing"])
async def test_a_peer_that_dies_in_the_middle_of_its_samples(how: str, config: RunConfig, parts: list[Part]) -> None:
    torch.set_num_threads(1)
    model = load_model(config.model.path)
    client = connect(config.redis)
    queue, fleet = RedisReplayQueue(client, config.run, config.replay), Fleet(client, config.run)
    try:
        named = {name: start_server(config, name, parts) for name in ("a", "b")}
        await until(fleet, lambda servers: [server.state for server in servers] == ["READY"] * 2, parts)
        sampling = Sampling(max_tokens=MAX_TOKENS, ignore_eos=True)
        prompt = Prompt(token_ids=(5, 6, 7), sampling=sampling, num_samples=NUM_SAMPLES, ground_truth="x")
        await queue.submit([encode_prompt(prompt)], [0], "")
        await queue.take_term(0)
        servers = await until(fleet, lambda servers: any(map(lends_rows, servers)), parts)
        [peer] = [server.server_id for server in servers if lends_rows(server)]
        [owner] = {"a", "b"} - {peer}
        if how != "nothing":
            named[peer].may_end = True
            named[peer].process.send_signal(signal.Signals[how])
        deadline = time.monotonic() + WAIT_S
        while (await queue.stat()).queued < 1:
            assert time.monotonic() < deadline, named[owner].output()[-2000:]
            await asyncio.sleep(0.05)
        [prompt_id] = await queue.take(1, 1)
        group = decode_group((await queue.fetch([prompt_id]))[0].payload)
        found, stat = counters(config, owner), await queue.stat()
    finally:
        await client.aclose()
    assert (group.attempt, group.server_id, len(group.trajectories)) == (1, owner, NUM_SAMPLES)
    assert (stat.conservation_error, stat.reclaimed) == (0, 0)
    lent = [trajectory.server_ids for trajectory in group.trajectories].count((peer,))
    sent = NUM_SAMPLES - ROWS
    assert lent == (sent if how == "nothing" else 0)
    assert found['penstock_rollout_peer_samples_total{outcome="answered"}'] == lent
    assert found['penstock_rollout_peer_samples_total{outcome="failed"}'] == sent - lent
    assert len({tuple(trajectory.token_ids.tolist()) for trajectory in group.trajectories}) == NUM_SAMPLES
    for trajectory in group.trajectories:
        assert len(trajectory.token_ids) == MAX_TOKENS and trajectory.finish_reason == "length"
        answer = Answer((5, 6, 7), tuple(trajectory.token_ids.tolist()), (), (), None)
        np.testing.assert_allclose(trajectory.log_probs, expected_log_probs(model, answer).numpy(), atol=TOLERANCE)
