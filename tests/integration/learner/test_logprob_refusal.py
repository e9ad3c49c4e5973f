"""The learner ends if the engine's log-probs differ from those of its own model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import PolicyRegistry
from penstock.store.redis_client import connect
from penstock.trajectory import Group
from support.groups import make_group
from support.learner_runs import GROUPS_PER_STEP, fill_queue, make_config, run_learner
from support.redis_server import RedisProcess
from support.tiny_models import make_tiny_qwen2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2(tmp_path_factory.mktemp("model"), seed=5)


def true_group(lm: Any, prompt_id: int) -> Group:
    """A made-up group with the log-probs of a plain Hugging Face forward pass."""
    group = make_group(prompt_id)
    prompt, trajectories = group.prompt_token_ids.tolist(), []
    for trajectory in group.trajectories:
        ids = trajectory.token_ids.tolist()
        with torch.inference_mode():
            scores = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        log_probs = scores.gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
        trajectories.append(replace(trajectory, log_probs=log_probs.astype(np.float32)))
    return replace(group, trajectories=tuple(trajectories))


@pytest.mark.long
@pytest.mark.parametrize("shift_nats", [0.0, 0.3])
def test_the_first_step_decides_whether_the_learner_goes_on(
    shift_nats: float, tmp_path: Path, model: Path, redis_process: RedisProcess
) -> None:
    """Adds an offset to every log-prob, as a wrong temperature or another model would, or no offset at all."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()

    def shifted(prompt_id: int) -> Group:
        group = true_group(lm, prompt_id)
        moved = (replace(t, log_probs=t.log_probs - np.float32(shift_nats)) for t in group.trajectories)
        return replace(group, trajectories=tuple(moved))

    run = f"shift-{shift_nats:g}".replace(".", "-")
    config = make_config(
        tmp_path, model, redis_process.url, run, num_steps=1, max_logprob_mismatch_nats=0.1,
        checkpoint={"every_steps": 1},
    )  # fmt: skip
    asyncio.run(fill_queue(config, GROUPS_PER_STEP, shifted))
    code, output = run_learner(config)
    trained, versions = asyncio.run(published(config))
    if not shift_nats:
        assert code == 0, output[-3000:]
        assert (trained, max(versions)) == (GROUPS_PER_STEP, 1)
        return
    assert code == 1, output[-3000:]
    last = output.strip().splitlines()[-1]
    assert last.startswith("penstock learner: error: rollout engines and learner disagree by 0.3 nats per token")
    assert (trained, max(versions)) == (0, 0), "nothing was acknowledged and no trained version published"
    assert not list((config.folder / "checkpoints").glob("term-*-step-*"))


async def published(config: Any) -> tuple[int, list[int]]:
    client = connect(config.redis)
    stat = await RedisReplayQueue(client, config.run, config.replay).stat()
    policies = await PolicyRegistry(client, config.run).newest_first(None, 100)
    await client.aclose()
    return stat.trained, [policy.policy_version for policy in policies]
