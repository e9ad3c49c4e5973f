"""Engines with a mixture of experts: updates in flight, and the experts that they report."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.learner import LearnerConfig, RouterConfig
from penstock.config.rollout import EngineConfig
from penstock.errors import ConfigError
from penstock.trajectory import Group, Sampling, Trajectory, VersionSegment
from penstock_learner.batches.sequence_batch import SequenceBatch, batch_of
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.causal_lm import load_model
from penstock_learner.model.routers import find_routers, watch_routers
from penstock_rollout.engines.engine import TokenChunk
from penstock_rollout.engines.factory import create_engine
from support.served_engines import Served, assert_log_probs, start_engine
from support.tiny_architectures import SETTINGS, write_tiny_experts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
CPU = torch.device("cpu")
CASES = [
    ("torch", "qwen3_moe"),
    *(pytest.param("torch", name, marks=pytest.mark.long) for name in SETTINGS if name != "qwen3_moe"),
    *(pytest.param("vllm", name, marks=pytest.mark.long) for name in ("qwen3_moe", "mixtral")),
]
_REFUSED = pytest.mark.xfail(reason="vLLM does not update its experts; check_serves_model refuses it", strict=True)


@pytest.mark.parametrize(
    ("kind", "name"), [*CASES, pytest.param("vllm", "gpt_oss", marks=[_REFUSED, pytest.mark.long])]
)
async def test_experts_are_updated_in_flight(kind: str, name: str, tmp_path: Path) -> None:
    served = await start_engine(kind, tmp_path, write_model=partial(write_tiny_experts, name))
    try:
        await served.check_serves(5)
        for _ in range(3):
            running = asyncio.create_task(served.answer((5, 6, 7), Sampling(temperature=0, max_tokens=200)))
            version = await served.update(served.next_model())
            await served.check_serves(version)
            await running
        for answer in await asyncio.gather(*(served.answer((index, 9), Sampling(max_tokens=24)) for index in range(8))):
            assert_log_probs(served.model, answer)
    finally:
        await served.engine.stop()


async def _sampled(served: Served, num_samples: int) -> SequenceBatch:
    """Samples of an engine that reports its experts, as the learner gets them."""

    async def trajectory(index: int) -> Trajectory:
        chunks: list[TokenChunk] = [
            chunk
            async for chunk in served.chunks((3, 4, 5), Sampling(max_tokens=24, seed=index), stream=index % 2 == 0)
        ]
        assert all(chunk.routed_experts is None for chunk in chunks[:-1])
        ids = np.array([token for chunk in chunks for token in chunk.token_ids], dtype=np.int32)
        return Trajectory(
            token_ids=ids,
            loss_mask=np.ones(len(ids), dtype=np.uint8),
            log_probs=np.array([value for chunk in chunks for value in chunk.log_probs], dtype=np.float32),
            segments=(VersionSegment(0, len(ids), 5),),
            reward=0.0,
            routed_experts=chunks[-1].routed_experts,
        )

    trajectories = tuple(await asyncio.gather(*(trajectory(index) for index in range(num_samples))))
    prompt = np.array([3, 4, 5], dtype=np.int32)
    for each in trajectories:
        assert each.routed_experts is not None and each.routed_experts.dtype == np.uint8
        assert each.routed_experts.shape[0] == len(prompt) + len(each.token_ids) - 1
    return batch_of([Group("r", 1, 1, "s", "d", Sampling(), prompt, trajectories)])


def _mismatch(folder: Path, batch: SequenceBatch, *, replay: bool, noise: float) -> tuple[float, float]:
    """Mean difference of log-probs between the engine and a learner with noisy routers, and the replayed share."""
    model = load_model(folder, torch.float32, 16)
    model.watch = watch_routers(model.lm, LearnerConfig(router=RouterConfig(replay=replay, aux_loss_coefficient=0.1)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for router in find_routers(model.lm):
            router.module.weight.add_(noise * torch.randn(router.module.weight.shape, generator=generator))
    log_probs, _ = model(ModelInputs.of(batch, CPU))
    assert model.watch is not None and (balance := model.watch.balance()) is not None
    difference = (log_probs.detach() - torch.as_tensor(batch.behaviour_log_probs)).abs()
    return float(difference.mean()), float(balance.replayed_share)


async def test_replaying_the_reported_experts_shrinks_the_mismatch(tmp_path: Path) -> None:
    write: Any = partial(write_tiny_experts, "qwen3_moe")
    served = await start_engine("torch", tmp_path, write_model=write, report_experts=True)
    try:
        batch = await _sampled(served, 16)
    finally:
        await served.engine.stop()
    exact, share = _mismatch(tmp_path, batch, replay=True, noise=0.0)
    without, none = _mismatch(tmp_path, batch, replay=False, noise=0.0)
    assert exact < 1e-3 and without < 1e-3, "the learner's own choice is the engine's, so replaying it changes nothing"
    num_tokens = int(batch.lengths.sum())
    assert share == pytest.approx((num_tokens - batch.num_sequences) / num_tokens) and none == 0
    replayed, _ = _mismatch(tmp_path, batch, replay=True, noise=0.02)
    chosen, _ = _mismatch(tmp_path, batch, replay=False, noise=0.02)
    assert replayed < 0.8 * chosen, "with weights that differ a little, some tokens would choose other experts"


def test_an_engine_that_cannot_report_experts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="router.replay needs rollout.engine.name vllm or torch"):
        create_engine(EngineConfig(name="sglang"), tmp_path, "float32", 0, report_experts=True)
