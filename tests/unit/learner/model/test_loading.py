"""Weights that are read part by part are those of `from_pretrained`, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import AutoModelForCausalLM

from penstock.config.learner import LearnerConfig, LoraConfig
from penstock.errors import ConfigError
from penstock_learner.model.adapter import add_adapter
from penstock_learner.model.causal_lm import load_model, open_model
from penstock_learner.model.loading import prepare_for_training, read_weights, shard
from support.tiny_architectures import ARCHITECTURES, tiny_model
from support.tiny_models import load_scalar_model, make_tiny_classifier, make_tiny_qwen2

CPU = torch.device("cpu")
FAST = {"llama, dynamic rope", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "jamba", "qwen3_next", "gpt2"}
"""Tied and renamed weights, buffers, and experts that files hold one by one. The long tests compare all."""


def assert_same(own: Any, plain: Any) -> None:
    """Both models have the same parameters and buffers, and the same of them are tied."""
    for kind in ("named_parameters", "named_buffers"):
        found, wanted = (dict(getattr(lm, kind)(remove_duplicate=False)) for lm in (own, plain))
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert dict(own.named_parameters()).keys() == dict(plain.named_parameters()).keys(), "tied"


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.long) for name in ARCHITECTURES]
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # in gpt_bigcode
def test_every_architecture_is_read_as_from_pretrained_reads_it(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert_same(load_model(tmp_path, dtype, 16).lm, plain)


def test_a_folder_of_several_files_is_read_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    monkeypatch.setattr("penstock_learner.model.loading.PIECE_BYTES", 100)
    monkeypatch.setattr("penstock_learner.model.loading._MAPPED_BYTES", 1000)
    assert_same(load_model(tmp_path, torch.float32, 16).lm, AutoModelForCausalLM.from_pretrained(tmp_path))


def test_no_weight_has_memory_before_it_is_read(tmp_path: Path) -> None:
    model = open_model(make_tiny_qwen2(tmp_path, seed=3), torch.float32, 16)
    add_adapter(model, LoraConfig(rank=4, alpha=16))
    assert all(parameter.is_meta for parameter in model.parameters())
    read_weights(model, CPU)
    assert not any(parameter.is_meta for parameter in model.parameters())
    plain = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    for name, parameter in model.lm.named_parameters():
        if "lora_B" in name:
            assert not parameter.any()
        elif "lora_A" in name:
            assert 0 < float(parameter.detach().std()) < 1
        else:
            assert torch.equal(parameter, plain[name.replace(".base_layer", "")])


def rewrite(folder: Path, change: Any) -> Path:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("kept", ["embedding", "head", "both", "both, different"])
def test_tied_weights_are_tied_as_from_pretrained_ties_them(kept: str, tmp_path: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        embedding = weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = embedding.clone() + (1 if kept == "both, different" else 0)
        if kept in ("embedding", "head"):
            del weights["lm_head.weight" if kept == "embedding" else "model.embed_tokens.weight"]

    rewrite(make_tiny_qwen2(tmp_path, seed=3), change)
    own = load_model(tmp_path, torch.float32, 16).lm
    assert_same(own, AutoModelForCausalLM.from_pretrained(tmp_path))
    assert (own.lm_head.weight is own.model.embed_tokens.weight) == (kept != "both, different")


def test_a_weight_that_is_missing_or_has_another_shape_is_named_in_one_line(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    make_tiny_qwen2(tmp_path, seed=3)
    rewrite(tmp_path, lambda weights: weights.update({name: weights[name][:-1].clone()}))
    with pytest.raises(ConfigError, match=rf"model.path .*: {name} has the shape .* but config.json asks for"):
        load_model(tmp_path, torch.float32, 16)
    rewrite(tmp_path, lambda weights: weights.pop(name))
    with pytest.raises(ConfigError, match=f"model.path .* has no weight {name}; give a complete checkpoint"):
        load_model(tmp_path, torch.float32, 16)


def test_a_critic_gets_a_head_of_zeros_and_a_classifier_keeps_its_own(tmp_path: Path) -> None:
    policy, classifier = make_tiny_qwen2(tmp_path / "policy", seed=3), make_tiny_classifier(tmp_path / "head", seed=4)
    fresh = load_scalar_model(policy, torch.float32, key="k", make_head=True).lm
    assert not fresh.score.weight.any()
    plain = AutoModelForCausalLM.from_pretrained(policy)
    assert torch.equal(fresh.model.layers[0].mlp.up_proj.weight, plain.model.layers[0].mlp.up_proj.weight)
    kept = load_scalar_model(classifier, torch.float32, key="k", make_head=True).lm
    assert torch.equal(kept.score.weight, load_file(classifier / "model.safetensors")["score.weight"])


def test_weights_in_another_format_are_loaded_whole(tmp_path: Path) -> None:
    make_tiny_qwen2(tmp_path, seed=3)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same(load_model(tmp_path, torch.float32, 16).lm, plain)


@pytest.mark.usefixtures("one_rank")
def test_quantized_weights_are_not_sharded_and_not_trained(tmp_path: Path) -> None:
    model = load_model(make_tiny_qwen2(tmp_path, seed=3), torch.float32, 16)
    model.lm.config.quantization_config = {"quant_method": "fp8"}
    shard(model, precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert not isinstance(model, FSDPModule)
    with pytest.raises(ConfigError, match="a model of type qwen2 with quantized weights cannot be trained"):
        prepare_for_training(model, LearnerConfig(), torch.float32, is_cuda=False)
