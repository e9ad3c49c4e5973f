"""The language model of a composite one is trained alone. The other parts stay what they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from penstock.config.learner import LoraConfig
from penstock.weights.folder_tensors import other_parts, stop_token_ids, tensor_shapes, vocabulary_size
from penstock.weights.transports import check_adapter
from penstock_learner.model.adapter import add_adapter
from penstock_learner.model.architectures import path_of
from penstock_learner.model.causal_lm import CausalLM, load_model
from penstock_learner.model.published_layout import PushedWeights, fit_to_folder, model_without_weights
from penstock_learner.model.self_check import compare_with_plain
from penstock_rollout.engines.torch import engine as torch_engine
from penstock_rollout.tokenization import Tokenization
from penstock_tools.export import write_folder
from penstock_tools.sizing.models import find_shape
from support.tiny_architectures import tiny_model
from support.tiny_models import load_scalar_model, write_tokenizer

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 9, 33, 4, 71, 20, 8, 15, 40, 12, 3, 66]])
TYPES = ["gemma3", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3_vl", "qwen3_5_moe", "llama4"))]


def _logits(lm: Any) -> torch.Tensor:
    lm.set_attn_implementation({"": "eager", "text_config": "eager"})
    with torch.no_grad():
        logits: torch.Tensor = lm.eval()(input_ids=IDS, use_cache=False).logits
    return logits


def _trained(name: str, folder: Path) -> CausalLM:
    """A model whose every weight has changed since its folder was read."""
    tiny_model(name).save_pretrained(folder)
    model = load_model(folder, torch.float32, 16)
    fit_to_folder(model.lm, folder, "model.path")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", TYPES)
def test_an_export_has_the_other_parts_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, out = _trained(name, tmp_path / "model"), tmp_path / "out"
    before, others = _stored(tmp_path / "model"), set(other_parts(tmp_path / "model"))
    write_folder(model.lm, tmp_path / "model", out, "bfloat16")
    after = _stored(out)
    assert others and after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) and after[name].dtype == torch.float32 for name in others)
    assert all(not torch.equal(after[name].float(), before[name]) for name in before.keys() - others)
    whole, report = AutoModelForMultimodalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    assert (_logits(whole) - _logits(model.lm.float())).abs().max() < 1e-4


@pytest.mark.parametrize("name", TYPES)
def test_the_torch_engine_serves_what_is_pushed(name: str, tmp_path: Path) -> None:
    model = _trained(name, tmp_path)
    served = torch_engine.load_model(tmp_path, "float32", "cpu")
    others = {key: tensor.clone() for key, tensor in served.state_dict().items() if "vision" in key or "visual" in key}
    pushed = {name: tensor.clone() for name, tensor in PushedWeights(model).gathered()}
    assert {name: tuple(tensor.shape) for name, tensor in pushed.items()} == tensor_shapes(tmp_path)
    torch_engine.load_into(served, pushed)
    assert others and all(torch.equal(served.state_dict()[key], tensor) for key, tensor in others.items())
    assert (_logits(served) - _logits(model.lm)).abs().max() < 1e-4


def test_every_form_of_names_in_a_folder_is_pushed_as_it_is(tmp_path: Path) -> None:
    tiny_model("gemma3").save_pretrained(tmp_path)
    older = _stored(tmp_path)
    newer = {
        f"model.{name.replace('language_model.model.', 'language_model.')}": tensor for name, tensor in older.items()
    }
    for stored, prefix in ((older, "language_model.model."), (newer, "model.language_model.")):
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
        wanted = {name: tuple(tensor.shape) for name, tensor in stored.items() if name.startswith(prefix)}
        for lm in (load_model(tmp_path, torch.float32, 16).lm, model_without_weights(tmp_path)):
            fit_to_folder(lm, tmp_path, "model.path")
            model = CausalLM(lm, 16, path_of(lm.config))
            assert wanted == tensor_shapes(tmp_path) == dict(PushedWeights(model).shapes)


def test_an_adapter_is_pushed_for_the_language_model_alone(tmp_path: Path) -> None:
    model = _trained("gemma3", tmp_path)
    add_adapter(model, LoraConfig(rank=2, alpha=4))
    pushed = {name: tuple(tensor.shape) for name, tensor in PushedWeights(model).gathered()}
    assert pushed and all(name.startswith("language_model.model.layers.") for name in pushed)
    check_adapter(pushed, tensor_shapes(tmp_path))


@pytest.mark.parametrize("name", TYPES)
def test_a_critic_is_the_language_model_with_a_head_of_its_own(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    critic = load_scalar_model(tmp_path, torch.float32, key="learner.critic.path", make_head=True)
    assert critic.lm.score.weight.shape == (1, 32) and not critic.lm.score.weight.any()
    assert not [key for key, _ in critic.lm.named_parameters() if "vision" in key or "lm_head" in key]
    assert compare_with_plain(critic, "learner.critic.path", CPU, torch.float32).ok


def test_a_plan_counts_the_language_model_alone(tmp_path: Path) -> None:
    tiny_model("qwen3_vl").save_pretrained(tmp_path)
    shape = find_shape(str(tmp_path))
    model = load_model(tmp_path, torch.float32, 16)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.num_layers, shape.hidden_size, shape.vocabulary_size) == (4, 32, 96)


def test_a_server_finds_what_the_config_nests_or_omits(tmp_path: Path) -> None:
    tiny_model("gemma3").save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 96)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    assert "vocab_size" not in config
    assert Tokenization(tmp_path).stop_ids == {2} == set(stop_token_ids(tmp_path))
    for text in (config["text_config"], config["text_config"] | {"vocab_size": None}):
        (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text}))
        assert vocabulary_size(tmp_path) == 96
