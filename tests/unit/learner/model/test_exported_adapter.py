"""`penstock export --adapter` writes a folder that peft loads. With it, the model computes what the merged one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from penstock.config.learner import LoraConfig
from penstock.errors import ConfigError, TrainingDiverged
from penstock_learner.model.adapter import add_adapter
from penstock_learner.model.causal_lm import CausalLM, load_model
from penstock_tools.export import merge_adapter, write_adapter
from support.tiny_architectures import tiny_model

MODEL = Path(__file__).parents[4] / "examples" / "arithmetic" / "model"


def adapted(lora: LoraConfig, folder: Path = MODEL) -> CausalLM:
    """A model whose adapter changes something."""
    model = load_model(folder, torch.float32, 64)
    add_adapter(model, lora)
    torch.manual_seed(1)
    for name, parameter in model.lm.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_()
    return model


@pytest.mark.parametrize(("targets", "written"), [
    ("all-linear", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    pytest.param(("q_proj", "v_proj"), {"q_proj", "v_proj"}, marks=pytest.mark.long),
    (("model.layers.0.self_attn.q_proj",), {"model.layers.0.self_attn.q_proj"}),
])  # fmt: skip
def test_peft_loads_the_adapter_and_computes_as_the_merged_model(
    tmp_path: Path, targets: Any, written: set[str]
) -> None:
    from peft import PeftModel  # takes seconds

    model = adapted(LoraConfig(rank=4, alpha=16, target_modules=targets))
    write_adapter(model.lm, MODEL, tmp_path / "adapter", "float32")
    assert {path.name for path in tmp_path.glob("adapter/*")} == {"adapter_config.json", "adapter_model.safetensors"}
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["task_type"]) == (4, 16, "CAUSAL_LM")
    assert set(described["target_modules"]) == written

    tokens = torch.tensor([[3, 5, 7, 9]])
    plain = AutoModelForCausalLM.from_pretrained(MODEL)
    before = plain(tokens).logits
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    merged: Any = AutoModelForCausalLM.from_pretrained(MODEL)
    merge_adapter(model.lm)
    merged.load_state_dict(model.lm.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, merged(tokens).logits, rtol=1e-4, atol=1e-4)
    assert (loaded(tokens).logits - before).abs().max() > 0.1


@pytest.mark.parametrize("name", ["gemma3", pytest.param("qwen3_5", marks=pytest.mark.long)])
def test_peft_adds_the_adapter_to_the_language_model_of_a_composite_one_alone(name: str, tmp_path: Path) -> None:
    """The vision tower of Gemma 3 has modules of the same names."""
    from peft import PeftModel

    folder = tmp_path / "model"
    tiny_model(name).save_pretrained(folder)
    model = adapted(LoraConfig(rank=2, alpha=4), folder)
    write_adapter(model.lm, folder, tmp_path / "adapter", "float32")
    matrices = {key for key, _ in model.lm.named_parameters() if ".lora_" in key}
    merge_adapter(model.lm)
    plain = AutoModelForMultimodalLM.from_pretrained(folder)
    for lm in (plain, model.lm):
        lm.set_attn_implementation({"": "eager", "text_config": "eager"})
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    assert {key for key, _ in plain.named_parameters() if ".lora_" in key} == matrices
    tokens = torch.tensor([[3, 5, 7, 9]])
    with torch.no_grad(), loaded.disable_adapter():
        before = loaded(input_ids=tokens).logits
    with torch.no_grad():
        found = loaded(input_ids=tokens).logits
        torch.testing.assert_close(found, model.lm(input_ids=tokens).logits, rtol=1e-4, atol=1e-4)
    assert (found - before).abs().max() > 0.1


def test_an_adapter_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    model = adapted(LoraConfig(rank=4, alpha=16))
    next(parameter for name, parameter in model.lm.named_parameters() if ".lora_B." in name).data.fill_(torch.inf)
    with pytest.raises(TrainingDiverged, match="is not finite in float32"):
        write_adapter(model.lm, MODEL, tmp_path / "adapter", "float32")
    assert not (tmp_path / "adapter").exists()


def test_an_adapter_that_peft_would_add_to_experts_is_not_written(tmp_path: Path) -> None:
    tiny_model("deepseek_v3").save_pretrained(tmp_path / "model")
    model = adapted(LoraConfig(rank=2, alpha=4), tmp_path / "model")
    with pytest.raises(ConfigError, match="cannot be written alone: peft would add it to experts") as raised:
        write_adapter(model.lm, tmp_path / "model", tmp_path / "adapter", "float32")
    assert "\n" not in str(raised.value) and not (tmp_path / "adapter").exists()
    model = adapted(LoraConfig(rank=2, alpha=4, target_modules=("o_proj",)), tmp_path / "model")
    write_adapter(model.lm, tmp_path / "model", tmp_path / "adapter", "float32")
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
