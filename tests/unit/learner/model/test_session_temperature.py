"""The learner computes the log-probs of a session at the temperatures of its calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.codec import decode_group, encode_group
from penstock.trajectory import Group
from penstock.v1 import groups_pb2, prompts_pb2, sessions_pb2
from penstock_learner.batches.sequence_batch import batch_of
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.causal_lm import load_model
from penstock_services.gateway.sessions.trajectories import RewardedTree, shared_prompts
from penstock_services.gateway.sessions.tree import SessionTree
from support.tiny_models import make_tiny_qwen2

NUM_TOKENS = 24
PROMPT = [3, 4, 5]
BETWEEN = [6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2(tmp_path_factory.mktemp("model"), seed=3)


def sampled_call(lm: Any, prompt: list[int], temperature: float, num_shared: int = 0) -> sessions_pb2.SessionCall:
    """A recorded call of an engine that samples at this temperature, and reports the log-probs of what it sampled."""
    ids, log_probs = list(prompt), []
    generator = torch.Generator().manual_seed(len(prompt))
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            scores = (lm(torch.tensor([ids])).logits[0, -1] / temperature).log_softmax(-1)
        token = int(torch.multinomial(scores.exp(), 1, generator=generator))
        ids.append(token)
        log_probs.append(float(scores[token]))
    return sessions_pb2.SessionCall(
        call_id=str(num_shared),
        base=0 if num_shared else -1,
        num_shared=num_shared,
        extra_token_ids=np.array(prompt[num_shared:], dtype="<i4").tobytes(),
        token_ids=np.array(ids[len(prompt) :], dtype="<i4").tobytes(),
        log_probs=np.array(log_probs, dtype="<f4").tobytes(),
        segments=[groups_pb2.VersionSegment(start=0, end=NUM_TOKENS, policy_version=0)],
        sampling=prompts_pb2.Sampling(temperature=temperature, top_p=1.0, max_tokens=NUM_TOKENS),
    )


@pytest.mark.parametrize("temperatures", [(0.6, 0.6), (0.6, 1.0), (1.4, 0.6)])
def test_the_learner_agrees_with_the_engine_at_the_temperatures_of_the_calls(
    folder: Path, temperatures: tuple[float, float]
) -> None:
    """A temperature of 1 for a session that was sampled at 0.6 is wrong by about 0.3 nats per token."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    first = sampled_call(lm, PROMPT, temperatures[0])
    answer = np.frombuffer(first.token_ids, dtype="<i4").tolist()
    second = sampled_call(lm, PROMPT + answer + BETWEEN, temperatures[1], len(PROMPT + answer))
    tree = SessionTree()
    tree.add([first.SerializeToString(), second.SerializeToString()])
    [made] = shared_prompts([RewardedTree(tree, 1.0, {})])
    group = Group("run", 1, 1, "s", "session", made.sampling, made.prompt_token_ids, made.trajectories)
    group = decode_group(encode_group(group))
    batch = batch_of([group])
    model = load_model(folder, torch.float32, chunk_tokens=16)
    found = model(ModelInputs.of(batch, torch.device("cpu")))[0].detach().numpy()
    sampled = batch.loss_mask == 1
    assert sampled.sum() == 2 * NUM_TOKENS
    difference = np.abs(found - batch.behaviour_log_probs)[sampled]
    assert difference.mean() < 1e-4, f"{difference.mean():.3f} nats"
