"""A server dies or is stopped in the middle of long samples: another one, with newer weights, continues them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.codec import decode_group, encode_prompt
from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import QueueStat
from penstock.store.redis_client import connect
from penstock.trajectory import Group, Prompt, Sampling, Trajectory
from penstock.v1 import policies_pb2
from penstock.weights.snapshot import write_snapshot
from penstock.weights.transports import weights_digest
from support.answers import Answer
from support.fleet_runs import Part, counters, start_server
from support.redis_server import RedisProcess
from support.served_engines import TOLERANCE, Push, expected_log_probs, load_model
from support.tiny_models import make_tiny_qwen2

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
NUM_SAMPLES, MAX_TOKENS, EVERY = 4, 600, 32


@pytest.fixture
def config(tmp_path: Path, redis_process: RedisProcess) -> RunConfig:
    return validate(
        {
            "run": f"continued-{tmp_path.name.lower()}",
            "run_dir": str(tmp_path),
            "model": {"path": str(make_tiny_qwen2(tmp_path / "model-0", seed=0))},
            "redis": {"url": redis_process.url},
            "replay": {"groups_per_step": 1, "max_staleness": 2, "lease_ttl_s": 4},
            "weights": {"catch_up": "snapshot"},
            "rollout": {
                "save_every_tokens": EVERY,
                "max_concurrent_groups": 2,
                "engine": {"name": "torch", "max_model_len": 1000},
                "reward": {"function_file": str(_reward_file(tmp_path))},
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


def _reward_file(folder: Path) -> Path:
    path = folder / "reward.py"
    path.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    return path


async def publish(config: RunConfig, queue: RedisReplayQueue, model: Any) -> None:
    """Publish the model as version 1, as a learner would after its first step."""
    push = Push.of(model, 1)
    folder = config.folder / "version-1"
    write_snapshot(folder, push.manifest, push.buckets, push.checksums)
    policy = policies_pb2.Policy(
        policy_version=1, step=1, snapshot_path=str(folder), weights_digest=weights_digest(push.checksums)
    )
    await queue.publish(1, 1, policy.SerializeToString())


async def until(queue: RedisReplayQueue, found: Callable[[QueueStat], bool], about: str, parts: list[Part]) -> None:
    """Poll the queue, while the newest server runs."""
    deadline = time.monotonic() + 400
    while not found(await queue.stat()):
        assert parts[-1].process.poll() is None, parts[-1].output()[-2000:]
        assert time.monotonic() < deadline, f"no {about}: {parts[-1].output()[-2000:]}"
        await asyncio.sleep(0.02)


def check_log_probs(group: Group, trajectory: Trajectory, models: list[Any]) -> None:
    """Each token's log-prob is that of the version that its segment names."""
    prompt, ids = tuple(group.prompt_token_ids.tolist()), tuple(trajectory.token_ids.tolist())
    answer = Answer(prompt, ids, (), (), None)
    recomputed = np.stack([expected_log_probs(model, answer).numpy() for model in models])
    versions = trajectory.token_versions()
    expected = recomputed[versions, np.arange(len(ids))]
    np.testing.assert_allclose(trajectory.log_probs, expected, atol=TOLERANCE)
    assert np.abs(recomputed[0] - recomputed[1]).mean() > 0.1, "the two versions must differ"


@pytest.mark.fault_row(
    "rollout servers", "{how} in long samples", how="to a server in the middle of 600-token samples",
    must="another server, with newer weights, continues them; the trajectories have the versions of both",
)  # fmt: skip
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
async def test_another_server_continues_the_samples(how: str, config: RunConfig, parts: list[Part]) -> None:
    torch.set_num_threads(1)
    models = [load_model(config.model.path), load_model(make_tiny_qwen2(config.run_dir / "model-1", seed=1))]
    client = connect(config.redis)
    queue = RedisReplayQueue(client, config.run, config.replay)
    try:
        sampling = Sampling(max_tokens=MAX_TOKENS, ignore_eos=True)
        prompt = Prompt(token_ids=(5, 6, 7), sampling=sampling, num_samples=NUM_SAMPLES, ground_truth="x")
        await queue.submit([encode_prompt(prompt)], [0], "")
        await queue.take_term(0)
        first = start_server(config, "a", parts)
        await until(queue, lambda stat: stat.saved_bytes > NUM_SAMPLES * 4 * EVERY, "saved tokens", parts)
        first.may_end = True
        first.process.send_signal(signal.Signals[how])
        first.process.wait(timeout=60)
        await publish(config, queue, models[1])
        start_server(config, "b", parts)
        await until(queue, lambda stat: stat.queued == 1, "group", parts)
        [prompt_id] = await queue.take(1, 1)
        group = decode_group((await queue.fetch([prompt_id]))[0].payload)
        found, stat = counters(config, "b"), await queue.stat()
    finally:
        await client.aclose()
    assert (group.attempt, group.server_id, len(group.trajectories)) == (2, "b", NUM_SAMPLES)
    continued = 0
    for trajectory in group.trajectories:
        assert len(trajectory.token_ids) == MAX_TOKENS and trajectory.finish_reason == "length"
        assert [segment.policy_version for segment in trajectory.segments] == [0, 1]
        assert trajectory.server_ids == ("a", "b")
        continued += trajectory.segments[0].end
        check_log_probs(group, trajectory, models)
    assert found["penstock_rollout_continued_tokens_total"] == continued >= NUM_SAMPLES * EVERY
    lost = found['penstock_rollout_regenerated_tokens_total{reason="lost"}']
    assert lost == (0 if how == "SIGTERM" else NUM_SAMPLES * EVERY / 2)
    assert (stat.conservation_error, stat.saved_bytes) == (0, 0)
    assert stat.reclaimed == (0 if how == "SIGTERM" else 1)
