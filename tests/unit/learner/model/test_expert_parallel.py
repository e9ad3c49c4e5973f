"""Ranks that share experts, or hold copies of the weights, train as one rank does."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from penstock.cli.main import main as cli
from penstock.config.loading import validate
from penstock.errors import ConfigError
from penstock_learner.checkpoints import TRAINER_FILE, write_manifest
from penstock_learner.model.expert_parallel import _exchanged, find_experts, require_experts
from penstock_learner.start_check import check
from penstock_learner.term import TrainerState
from support.expert_ranks import WRITER, Cases, assert_same, run_cases
from support.learner_ranks import one_rank_world
from support.tiny_architectures import tiny_model
from support.tiny_models import write_tokenizer

REPLAY = {"router": {"replay": True}}
CASES: Cases = {
    "one rank": (1, {}),
    "starved, one rank": (1, REPLAY),
    "two ranks share": (2, {"expert_parallel": 2}),
    "two copies": (2, {"shard_size": 1}),
    "four ranks": (4, {}),
    "four ranks, 2 share": (4, {"expert_parallel": 2}),
    "copies of 2 that share": (4, {"expert_parallel": 2, "shard_size": 2}),
    "starved": (4, {"expert_parallel": 4, **REPLAY}),
    "sequence-parallel": (4, {"expert_parallel": 2, "sequence_parallel": 2}),
    "on the host": (4, {"expert_parallel": 2, "offload": "all"}),
}


COMPILED: Cases = {
    "one rank": (1, {}),
    "compiled": (2, {"expert_parallel": 2, "compile": True, "activation_checkpointing": 0.5}),
    "starved, one rank": (1, REPLAY),
    "starved, compiled": (2, {"expert_parallel": 2, "compile": True, **REPLAY}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    run_cases(root, CASES, "cpu")
    return root


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("one rank")])
def test_loss_gradient_norm_and_weights_are_those_of_one_rank(folder: Path, name: str) -> None:
    assert_same(folder, name, "starved, one rank" if name == "starved" else "one rank", 1e-5)


@pytest.mark.long
def test_compiled_layers_give_the_same(tmp_path: Path) -> None:
    run_cases(tmp_path, COMPILED, "cpu")
    assert_same(tmp_path, "compiled", "one rank", 1e-5)
    assert_same(tmp_path, "starved, compiled", "starved, one rank", 1e-5)


def test_what_is_pushed_has_the_names_and_the_numbers_of_the_folder(folder: Path) -> None:
    stored, tensors = load_file(folder / "model" / "model.safetensors"), load_file(folder / f"{WRITER}.safetensors")
    assert {key.removeprefix("before ") for key in tensors if key.startswith("before")} == stored.keys()
    assert all(torch.equal(tensors[f"before {name}"], weight) for name, weight in stored.items())


def test_routers_replay_before_tokens_are_exchanged(folder: Path) -> None:
    assert json.loads((folder / "starved.json").read_text())["replayed"] > 0.5


def test_a_checkpoint_loads_with_any_expert_parallel(folder: Path) -> None:
    said = json.loads((folder / "loaded.json").read_text())
    assert said == {name: [] for name, (ranks, _) in CASES.items() if ranks == 4}


def test_an_export_of_shared_experts_has_the_weights_that_are_pushed(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{path: {folder / 'model'}, dtype: float32}}")
    (folder / "shards" / TRAINER_FILE).write_text(json.dumps(asdict(TrainerState())))
    write_manifest(folder / "shards", {})
    words = ["export", "--config", str(config), "--checkpoint", str(folder / "shards"), "--out", str(tmp_path / "out")]
    assert cli(words) == 0
    exported, tensors = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / f"{WRITER}.safetensors")
    assert exported and all(torch.equal(tensors[f"after {name}"], weight) for name, weight in exported.items())


FAST = ["aria_text", "deepseek_v3", "gemma4_text, experts", "gpt_oss", "mixtral", "nemotron_h", "qwen3_moe", "zaya"]
_OTHERS = """
    afmoe axk1 axk2 cohere2_moe deepseek_v2 deepseek_v32 deepseek_v4 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe
    glm4_moe_lite glm_moe_dsa granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4
    inkling_text jamba kimi_linear laguna lfm2_moe mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text olmoe
    phimoe qwen2_moe qwen3_5_moe_text qwen3_next solar_open
"""
LONG = [pytest.param(name, marks=pytest.mark.long) for name in _OTHERS.split()]


@pytest.mark.parametrize("name", [*FAST, *LONG])
def test_experts_of_a_type_can_be_shared(name: str) -> None:
    """They compute rows that come from elsewhere, and apply the weights of the choices at the very end."""
    model = tiny_model(name)
    tokens = torch.arange(2, 50).view(2, 24)
    with one_rank_world(), torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        require_experts(model, 2)
        found = find_experts(model)
        assert found
        for experts in found:
            assert dist.group.WORLD is not None
            experts.forward = partial(_exchanged, experts, dist.group.WORLD)
        torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"expert_parallel": 2}, "multiple of expert_parallel"),
        ({"policy": {"num_ranks": 4}, "expert_parallel": 4, "shard_size": 2}, "multiple of expert_parallel"),
        ({"policy": {"num_ranks": 4}, "shard_size": 3}, "multiple of shard_size"),
        ({"policy": {"num_ranks": 2}, "expert_parallel": 2, "lora": {"rank": 4, "alpha": 8}}, "remove lora"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        validate({"model": {"path": "anything"}, "learner": settings}, "test")


@pytest.mark.parametrize(
    ("name", "num_ranks", "reason"),
    [("qwen3_moe", 3, "does not divide the 4 experts"), ("qwen3", 2, "has no fused experts")],
)
def test_a_model_whose_experts_cannot_be_shared_is_refused(
    name: str, num_ranks: int, reason: str, tmp_path: Path
) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, vocab_size=model.config.vocab_size)
    learner = {"policy": {"num_ranks": num_ranks}, "expert_parallel": num_ranks}
    run = {"run_dir": str(tmp_path / "runs"), "redis": {"url": "redis://127.0.0.1:1"}}
    config = validate({"model": {"path": str(tmp_path)}, "learner": learner, **run}, "test")
    with pytest.raises(ConfigError, match=reason):
        check(config, with_ray=False)
