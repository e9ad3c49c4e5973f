"""A whole run with a tiny mixture of experts: it trains, pushes in flight, resumes and is exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from demo_process import ROOT, DemoProcess
from penstock.cli.main import main as cli

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
EXAMPLE_MODEL = ROOT / "examples" / "arithmetic" / "model"
OVERRIDES = {
    "rollout.engine.name": "torch", "learner.policy.num_ranks": "2", "learner.algorithm.kl.placement": "none",
    "replay.groups_per_step": "8", "learner.checkpoint.every_steps": "3", "learner.router.replay": "true",
    "learner.router.aux_loss_coefficient": "0.01", "learner.activation_checkpointing": "1",
}  # fmt: skip


def write_model(folder: Path) -> None:
    """A random Qwen3-MoE with the tokenizer of the example."""
    shutil.copytree(EXAMPLE_MODEL, folder)
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=128, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)


def run_until(folder: Path, model: Path, num_steps: int) -> list[dict[str, float]]:
    """Run the demo to this step. Returns the numbers of all steps so far."""
    settings = OVERRIDES | {"model.path": str(model), "learner.num_steps": str(num_steps)}
    run = DemoProcess(folder, *[word for name, value in settings.items() for word in (f"--{name}", value)])
    try:
        assert run.wait() == 0, run.text()[-4000:]
    finally:
        run.end()
    return [json.loads(line) for line in (folder / "t" / "metrics.jsonl").read_text().splitlines()]


def test_a_mixture_of_experts_trains_pushes_resumes_and_is_exported(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model)
    steps = run_until(tmp_path, model, 6)
    steps = run_until(tmp_path, model, 9)
    assert [step["step"] for step in steps] == list(range(1, 10)), "the second run continued from the checkpoint"
    for step in steps:
        assert step["skipped"] == 0 and step["router_aux_loss"] >= 1.9 and step["expert_load_max"] > 1
        assert step["router_replayed_ratio"] > 0.7, "all tokens but the last of each sequence are replayed"
        assert step.get("logprob_mismatch", 0.0) < 1e-3
    assert steps[-1]["in_flight_updates"] >= 1 or steps[5]["in_flight_updates"] >= 1
    config = tmp_path / "config.yaml"
    config.write_text((tmp_path / "t" / "config.yaml").read_text())
    out = tmp_path / "exported"
    assert cli(["export", "--config", str(config), "--out", str(out)]) == 0
    first, trained = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert first.keys() == trained.keys() and "model.layers.0.mlp.experts.7.down_proj.weight" in trained
    assert all(first[name].shape == trained[name].shape for name in first)
    changed = [name for name in first if not torch.equal(first[name], trained[name])]
    assert {"experts", "gate"} <= {part for name in changed for part in name.split(".")}
    lm = AutoModelForCausalLM.from_pretrained(out)
    assert lm.config.num_experts == 8
    fused = lm.state_dict()["model.layers.0.mlp.experts.down_proj"][7]
    assert torch.equal(fused, trained["model.layers.0.mlp.experts.7.down_proj.weight"])
