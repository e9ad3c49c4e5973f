"""A gather has the names, shapes and bytes of the model's folder, whatever form transformers holds the weights in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.learner import LoraConfig
from penstock.config.loading import validate
from penstock.errors import ConfigError
from penstock.weights.folder_tensors import other_parts, tensor_shapes
from penstock.weights.transports import check_adapter
from penstock_learner.model.adapter import add_adapter
from penstock_learner.model.causal_lm import CausalLM, load_model
from penstock_learner.model.published_layout import PushedWeights, fit_to_folder, model_without_weights
from penstock_learner.start_check import _check_structure
from penstock_learner.weights.publisher import WeightPublisher
from penstock_rollout.weights.stage import merged_weights
from support.learner_ranks import with_model
from support.tiny_architectures import ARCHITECTURES, COMPOSITES, tiny_model

FAST = {"qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "llama"}
"""Experts of each kind, and a dense model. The others are compared in the long tests."""
REFUSED = {
    "deepseek_v4": "cannot be pushed to engines",
    "zamba2": "cannot be pushed to engines",
    "hrm_text": "cannot be sharded",
    "longcat_flash": "cannot be sharded",
}
"""Architectures that cannot be pushed, and why. They are refused before anything is trained."""
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
DENSE = ("gate_proj", "up_proj", "down_proj")
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def _cases() -> list[Any]:
    names = [*ARCHITECTURES, *COMPOSITES]
    return [name if name in FAST | REFUSED.keys() else pytest.param(name, marks=pytest.mark.long) for name in names]


def _loaded(name: str, folder: Path) -> CausalLM:
    tiny_model(name).save_pretrained(folder)
    model = load_model(folder, torch.float32, 16)
    fit_to_folder(model.lm, folder, "model.path")
    return model


@pytest.mark.parametrize("name", _cases())
def test_a_gather_is_what_the_folder_contains(name: str, tmp_path: Path) -> None:
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]) as raised:
            PushedWeights(_loaded(name, tmp_path))
        assert "\n" not in str(raised.value)
        return
    model = _loaded(name, tmp_path)
    others = set(other_parts(tmp_path))
    assert bool(others) == (name in COMPOSITES)
    stored = {key: tensor for key, tensor in load_file(tmp_path / "model.safetensors").items() if key not in others}
    pushed = PushedWeights(model)
    gathered = {name: tensor.clone() for name, tensor in pushed.gathered()}
    assert gathered.keys() == stored.keys()
    assert all(torch.equal(gathered[name], stored[name]) for name in stored)
    assert pushed.shapes == [(name, tuple(tensor.shape)) for name, tensor in gathered.items()]
    before = {name: tensor.clone() for name, tensor in model.lm.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    pushed.load(stored.__getitem__)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.lm.state_dict().items())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_are_published_one_by_one_in_memory_of_a_layer(name: str, tmp_path: Path) -> None:
    model = _loaded(name, tmp_path)
    assert any("experts.gate_up_proj" in name for name, _ in model.lm.named_parameters()), "transformers fuses them"
    names = [name for name, _ in PushedWeights(model).shapes]
    assert not any("gate_up_proj" in name for name in names) and any(".experts.3." in name for name in names)
    layers = [int(name.split(".layers.")[1].split(".")[0]) for name in names if ".layers." in name]
    assert layers == sorted(layers), "a layer is gathered once and then left"


def test_a_folder_with_fused_experts_keeps_them(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensor_shapes(tmp_path)
    for lm in (load_model(tmp_path, torch.float32, 16).lm, model_without_weights(tmp_path)):
        fit_to_folder(lm, tmp_path, "model.path")
        model = CausalLM(lm, 16, load_model(tmp_path, torch.float32, 16).path)
        assert dict(PushedWeights(model).shapes) == tensor_shapes(tmp_path)


def test_layers_that_predict_ahead_are_not_pushed(tmp_path: Path) -> None:
    tiny_model("glm4_moe").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.4.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    fit_to_folder(model_without_weights(tmp_path), tmp_path, "model.path")
    assert "model.layers.4.eh_proj.weight" not in tensor_shapes(tmp_path)


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("qwen3_next", {"mtp.layers.0.mlp.up_proj.weight": (8, 8), "mtp.norm.weight": (8,)}),
        ("mimo_v2_flash", {"model.mtp.layers.0.mlp.up_proj.weight": (8, 8)}),
        ("gpt2", {"transformer.h.0.attn.bias": (1, 1, 8, 8), "transformer.h.0.attn.masked_bias": ()}),
        ("gpt_neox", {f"gpt_neox.layers.0.attention.{end}": (1, 1, 8, 8) for end in ("bias", "masked_bias")}),
    ],
)
def test_tensors_that_the_model_ignores_are_neither_pushed_nor_refused(
    name: str, unused: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    used = load_file(tmp_path / "model.safetensors")
    assert tensor_shapes(tmp_path).keys() == used.keys(), "learned biases are pushed"
    zeros = {name: torch.zeros(shape) for name, shape in unused.items()}
    save_file(used | zeros, tmp_path / "model.safetensors", {"format": "pt"})
    assert tensor_shapes(tmp_path).keys() == used.keys()
    assert dict(merged_weights(tmp_path, {}, 1.0)).keys() == used.keys()
    model = load_model(tmp_path, torch.float32, 16)
    fit_to_folder(model.lm, tmp_path, "model.path")
    assert dict(PushedWeights(model).shapes).keys() == used.keys()


def test_only_the_files_of_the_index_are_the_model(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shapes, merged = tensor_shapes(tmp_path), dict(merged_weights(tmp_path, {}, 1.0))
    save_file({"layers.0.attention.wq.weight": torch.zeros(8, 8)}, tmp_path / "consolidated.safetensors")
    assert tensor_shapes(tmp_path) == shapes
    assert dict(merged_weights(tmp_path, {}, 1.0)).keys() == merged.keys()
    fit_to_folder(model_without_weights(tmp_path), tmp_path, "model.path")
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(ConfigError, match=f"lacks {shard.name}, which its model.safetensors.index.json names"):
        tensor_shapes(tmp_path)


def test_weights_in_another_form_are_refused_before_anything_starts(tmp_path: Path) -> None:
    tiny_model("gpt_oss").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    fused = "model.layers.0.mlp.experts.down_proj"
    stored[f"{fused}_blocks"] = stored.pop(fused)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ConfigError, match=r"down_proj_blocks; it is stored as mxfp4: load it in bfloat16") as raised:
        _check_structure(validate(with_model({}, tmp_path), "test"))
    assert "\n" not in str(raised.value)


def test_a_routers_bias_is_pushed_in_float32(tmp_path: Path) -> None:
    model = _loaded("deepseek_v3", tmp_path)
    bias = model.lm.get_buffer(BIAS)
    bias.copy_(torch.rand(len(bias)) + 1 / 3)
    pushed = PushedWeights(model)
    assert BIAS in pushed.exact and "model.embed_tokens.weight" not in pushed.exact
    config = validate(with_model({}, tmp_path) | {"model": {"path": str(tmp_path), "dtype": "bfloat16"}}, "test")
    publisher = WeightPublisher(config, "127.0.0.1")
    staged = publisher.begin(1, 1, pushed.shapes, exact=pushed.exact)
    for name, weight in pushed.gathered():
        staged.put(name, weight)
    spec = next(spec for spec in staged.manifest.tensors if spec.name == BIAS)
    raw = staged.memory.buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
    assert spec.dtype == "F32" and torch.equal(raw.view(torch.float32), bias)
    assert {spec.dtype for spec in staged.manifest.tensors} == {"F32", "BF16"}


@pytest.mark.parametrize(
    ("name", "adapted"),
    [
        ("phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("glm4", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("qwen3", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("gpt_oss", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("mixtral", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("deepseek_v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *DENSE}),
        ("glm4_moe", {"q_proj", "k_proj", "v_proj", "o_proj", *DENSE}),
        ("llama4_text", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_an_adapter_covers_all_linear_layers_under_the_folders_names(
    name: str, adapted: set[str], tmp_path: Path
) -> None:
    model = _loaded(name, tmp_path)
    add_adapter(model, LoraConfig(rank=2, alpha=4))
    shapes = dict(PushedWeights(model).shapes)
    assert {name.split(".")[-3] for name in shapes} == adapted
    check_adapter(shapes, tensor_shapes(tmp_path))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in PushedWeights(model).gathered()}


def test_a_target_that_engines_cannot_adapt_is_refused(tmp_path: Path) -> None:
    for target, reason in (("nothing", "does not fit the model"), ("embed_tokens", "not a linear layer")):
        with pytest.raises(ConfigError, match=reason) as raised:
            add_adapter(_loaded("llama", tmp_path), LoraConfig(rank=2, alpha=4, target_modules=(target,)))
        assert "\n" not in str(raised.value)
