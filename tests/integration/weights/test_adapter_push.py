"""Low-rank adapters: they are trained sharded, pushed without the base weights, and served merged."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.config.learner import LoraConfig
from penstock_learner.model.adapter import add_adapter
from penstock_learner.model.causal_lm import CausalLM, load_model
from penstock_learner.model.loading import shard
from penstock_learner.model.published_layout import PushedWeights
from penstock_learner.weights.publisher import WeightPublisher
from support.engine_member import HOST, config_of, greedy_log_probs, member
from support.learner_runs import GROUPS_PER_STEP, NUM_STEPS, fill_queue, make_config, outcome, run_learner
from support.redis_server import RedisProcess
from support.tiny_architectures import write_tiny_experts
from support.tiny_models import make_tiny_qwen2

LORA = LoraConfig(rank=4, alpha=16)
OF_EXPERTS = LoraConfig(rank=4, alpha=16, target_modules=("q_proj", "experts.gate_up_proj", "experts.down_proj"))


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def adapted(model_path: Path, lora: LoraConfig) -> CausalLM:
    """A sharded model with an adapter that changes something."""
    model = load_model(model_path, torch.float32, 64)
    add_adapter(model, lora)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    shard(model)
    return model


def merged(model_path: Path, weights: dict[str, torch.Tensor], target: Path) -> Any:
    """The folder's model with the adapter added by hand."""
    shutil.copytree(model_path, target)
    scale, stored = LORA.alpha / LORA.rank, load_file(model_path / "model.safetensors")
    for name in stored:
        if f"{name}.lora_A" in weights:
            stored[name] += scale * weights[f"{name}.lora_B"] @ weights[f"{name}.lora_A"]
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(target)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("lora", [LORA, OF_EXPERTS], ids=["dense", "experts"])
async def test_only_the_adapter_travels_and_the_engine_serves_the_sum(lora: LoraConfig, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if lora is LORA:
        make_tiny_qwen2(path, seed=1)
    else:
        write_tiny_experts("qwen3_moe", path)
    config = config_of(tmp_path, path, None)
    model = adapted(path, lora)
    pushed = PushedWeights(model)
    weights = {name: weight.clone() for name, weight in pushed.gathered()}
    async with member(config) as (target, engine, _):
        publisher = WeightPublisher(config, HOST)
        staged = publisher.begin(1, 1, pushed.shapes, adapter_scale=LORA.alpha / LORA.rank)
        for name, weight in weights.items():
            staged.put(name, weight)
        report = await asyncio.to_thread(publisher.push, 1, [target])
        assert report.committed == [target.server_id], report.failed
        assert report.num_bytes < sum(file.stat().st_size for file in path.glob("*.safetensors")) / 2
        tokens, log_probs = await greedy_log_probs(engine, (5, 6, 7))
    with torch.no_grad():
        served = merged(path, {name: weight.detach() for name, weight in weights.items()}, tmp_path / "merged")
        logits = served(torch.tensor([[5, 6, 7, *tokens]])).logits[0, 2:-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert logits.argmax(-1).tolist() == tokens
    torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-3, rtol=0)


@pytest.mark.long  # unit tests train adapters, and the other tests here push them
def test_a_learner_trains_an_adapter(tmp_path: Path, redis_process: RedisProcess) -> None:
    path = make_tiny_qwen2(tmp_path / "model", seed=1)
    lora = {"rank": 4, "alpha": 16}
    config = make_config(tmp_path, path, redis_process.url, "lora", lora=lora, policy={"num_ranks": 2})
    asyncio.run(fill_queue(config))
    code, output = run_learner(config)
    assert code == 0, output[-3000:]
    result = outcome(config)
    assert result.stat.trained == GROUPS_PER_STEP * NUM_STEPS
    assert len(set(result.digests.values())) == len(result.digests) > 1, "every step changed the adapter"
