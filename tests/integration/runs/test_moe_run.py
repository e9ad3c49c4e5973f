"""A tiny mixture of experts in a whole run, and in a learner that stops, resumes and is exported."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from penstock.cli.main import main as cli
from support.learner_runs import GROUPS_PER_STEP, checkpoint_state, fill_queue, make_config, run_learner
from support.processes import ROOT, DemoProcess
from support.redis_server import RedisProcess
from support.tiny_architectures import write_tiny_experts

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
EXAMPLE = ROOT / "examples" / "arithmetic"
OVERRIDES = {
    "rollout.engine.name": "torch", "learner.policy.num_ranks": "2", "learner.algorithm.kl.placement": "none",
    "replay.groups_per_step": "4", "learner.checkpoint.every_steps": "3", "learner.router.replay": "true",
    "learner.router.aux_loss_coefficient": "0.01", "learner.activation_checkpointing": "1", "learner.num_steps": "6",
    "demo.num_samples": "4",
}  # fmt: skip


def write_model(folder: Path) -> None:
    """A random Qwen3-MoE with the tokenizer of the example."""
    shutil.copytree(EXAMPLE / "model", folder)
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=128, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)


def test_a_mixture_of_experts_trains_and_is_pushed_in_flight(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    parquet.write_table(parquet.read_table(EXAMPLE / "heldout.parquet").slice(0, 4), tmp_path / "heldout.parquet")
    paths = {"model.path": str(tmp_path / "model"), "demo.heldout_file": str(tmp_path / "heldout.parquet")}
    words = [word for name, value in (OVERRIDES | paths).items() for word in (f"--{name}", value)]
    run = DemoProcess(tmp_path, *words)
    try:
        assert run.wait() == 0, run.text()[-4000:]
    finally:
        run.end()
    steps = [json.loads(line) for line in (tmp_path / "t" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 7))
    for step in steps:
        assert step["skipped"] == 0 and step["router_aux_loss"] >= 1.9 and step["expert_load_max"] > 1
        assert step["router_replayed_ratio"] > 0.7, "all tokens but the last of each sequence are replayed"
        assert step.get("logprob_mismatch", 0.0) < 1e-3
    assert any("logprob_mismatch" in step for step in steps)


def test_a_mixture_of_experts_resumes_on_fewer_ranks_and_is_exported(
    tmp_path: Path, redis_process: RedisProcess
) -> None:
    model = tmp_path / "model"
    write_tiny_experts("qwen3_moe", model)
    for num_ranks, num_steps in ((2, 4), (1, 6)):
        config = make_config(
            tmp_path, model, redis_process.url, "moe", policy={"num_ranks": num_ranks}, num_steps=num_steps
        )
        if num_ranks == 2:
            asyncio.run(fill_queue(config, GROUPS_PER_STEP * 6))
        code, output = run_learner(config)
        assert code == 0, output[-3000:]
    steps = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 7)), "the second learner continued from the checkpoint"
    out = tmp_path / "exported"
    assert cli(["export", "--config", str(config.folder / "config.yaml"), "--out", str(out)]) == 0
    first, trained = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: tensor.shape for name, tensor in first.items()} == {name: t.shape for name, t in trained.items()}
    assert not torch.equal(first["model.layers.0.mlp.gate.weight"], trained["model.layers.0.mlp.gate.weight"])
    newest = sorted((config.folder / "checkpoints").glob("term-*-step-*"))[-1]
    kept = {name.removeprefix("lm."): tensor for name, tensor in checkpoint_state(newest)["model"].items()}
    exported = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in kept
    assert all(torch.equal(exported[name], tensor) for name, tensor in kept.items())
