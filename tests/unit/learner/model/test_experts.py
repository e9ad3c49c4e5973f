"""Fused experts: one grouped product gives what one expert after the other gives, and adapters of experts are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.autograd import gradcheck
from transformers import AutoModelForCausalLM

from penstock.config.learner import LearnerConfig, LoraConfig
from penstock.errors import ConfigError
from penstock.weights.folder_tensors import tensor_shapes
from penstock.weights.transports import check_adapter
from penstock_learner.model.adapter import adapter_off, add_adapter
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.causal_lm import CausalLM, load_model
from penstock_learner.model.experts import compute_experts, grouped_product
from penstock_learner.model.published_layout import PushedWeights, fit_to_folder
from penstock_learner.model.routers import watch_routers
from penstock_rollout.weights.stage import merged_weights
from penstock_tools.export import merge_adapter, write_adapter, write_folder
from support.tiny_architectures import random_batch, tiny_model

FUSED = ("experts.gate_up_proj", "experts.down_proj")
_ADAPTED = """
    afmoe aria_text cohere2_moe deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite
    gpt_oss granitemoe granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 laguna lfm2_moe mellum mimo_v2_flash
    minimax_m2 mixtral olmoe qwen2_moe qwen3_moe qwen3_next solar_open
"""
ADAPTED = _ADAPTED.split()
"""Architectures whose fused experts can be adapted."""
FAST = {"qwen3_moe", "gpt_oss"}
"""Experts that folders hold one by one, and fused and transposed."""


def _one_after_the_other(module: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    result: Tensor = type(module).forward.__wrapped__(module, states, chosen, weights)
    return result


def _computed(function: Any, module: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The output, and the gradients of states, weights of the choice, and parameters. Expert 2 has no token."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(11, 32, generator=generator, dtype=dtype, requires_grad=True)
    weights = torch.rand(11, 2, generator=generator, dtype=dtype).requires_grad_()
    chosen = torch.tensor([[0, 1], [1, 3], [3, 0]])[torch.randint(3, (11,), generator=generator)]
    module.zero_grad()
    output = function(module, states, chosen, weights)
    (output * torch.linspace(-1, 1, 32, dtype=dtype)).sum().backward()
    assert states.grad is not None and weights.grad is not None
    return output.detach(), states.grad, weights.grad, *(parameter.grad for parameter in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_grouped_experts_are_one_after_the_other(name: str, dtype: torch.dtype) -> None:
    module = tiny_model(name).model.layers[0].mlp.experts.to(dtype)
    close: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.1}
    wanted = _computed(_one_after_the_other, module, dtype)
    torch.testing.assert_close(_computed(compute_experts, module, dtype), wanted, **close)


def test_a_product_whose_sizes_torch_does_not_group_is_the_same() -> None:
    rows, weights = torch.randn(7, 3, dtype=torch.float64), torch.randn(4, 3, 5, dtype=torch.float64)
    ends = torch.tensor([2, 2, 6, 7], dtype=torch.int32)
    experts = torch.tensor([0, 0, 2, 2, 2, 2, 3])
    wanted = torch.einsum("si,sio->so", rows, weights[experts])
    torch.testing.assert_close(grouped_product(rows, weights, ends), wanted)
    narrow = grouped_product(rows.bfloat16(), weights.bfloat16(), ends)
    torch.testing.assert_close(narrow.double(), wanted, atol=0.05, rtol=0.05)
    assert gradcheck(lambda *both: grouped_product(*both, ends), (rows.requires_grad_(), weights.requires_grad_()))


def _log_probs(model: CausalLM) -> Tensor:
    log_probs, _ = model(ModelInputs.of(random_batch(), torch.device("cpu")))
    return log_probs


def _adapted(folder: Path, targets: tuple[str, ...], rank: int = 3) -> CausalLM:
    """A model whose adapter changes something."""
    model = load_model(folder, torch.float32, 16)
    fit_to_folder(model.lm, folder, "model.path")
    add_adapter(model, LoraConfig(rank=rank, alpha=2 * rank, target_modules=targets))
    torch.manual_seed(0)
    for name, parameter in model.lm.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.long)
                                  for name in ADAPTED])  # fmt: skip
def test_an_adapter_of_experts_trains_and_is_pushed_merged_and_exported_exactly(name: str, tmp_path: Path) -> None:
    from peft import PeftModel  # takes seconds

    source = tmp_path / "model"
    tiny_model(name).save_pretrained(source)
    model, plain = _adapted(source, FUSED), _log_probs(load_model(source, torch.float32, 16)).detach()
    matrices = {name: weight for name, weight in model.lm.named_parameters() if ".lora_" in name}
    trained = _log_probs(model)
    trained.sum().backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in matrices.values())
    assert float((trained - plain).detach().abs().max()) > 0.1
    with adapter_off(model), torch.no_grad():
        torch.testing.assert_close(_log_probs(model), plain, rtol=0, atol=0)

    pushed, kept = PushedWeights(model), {name: weight.detach().clone() for name, weight in matrices.items()}
    gathered = {name: tensor.clone() for name, tensor in pushed.gathered()}
    check_adapter({name: tuple(tensor.shape) for name, tensor in gathered.items()}, tensor_shapes(source))
    assert pushed.shapes == [(name, tuple(tensor.shape)) for name, tensor in gathered.items()]
    with torch.no_grad():
        for weight in matrices.values():
            weight.zero_()
    pushed.load(gathered.__getitem__)
    assert all(torch.equal(weight, kept[name]) for name, weight in matrices.items())

    write_adapter(model.lm, source, tmp_path / "adapter", "float32")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), str(tmp_path / "adapter"))
    merge_adapter(model.lm)
    torch.testing.assert_close(_log_probs(model), trained, rtol=1e-3, atol=1e-3)
    write_folder(model.lm, source, tmp_path / "merged", "float32")
    served, merged = dict(merged_weights(source, gathered, 2.0)), load_file(tmp_path / "merged" / "model.safetensors")
    for weight_name in merged.keys() & served.keys():
        torch.testing.assert_close(merged[weight_name], served[weight_name], rtol=1e-6, atol=1e-6)
    tokens = torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
        torch.testing.assert_close(loaded(tokens).logits, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 8])
def test_an_adapter_of_a_folder_with_fused_experts_is_pushed_fused(rank: int, tmp_path: Path) -> None:
    for original in (True, False):
        tiny_model("qwen3_moe").save_pretrained(tmp_path, save_original_format=original)
        model = _adapted(tmp_path, ("experts.gate_up_proj", "q_proj"), rank)
        shapes = dict(PushedWeights(model).shapes)
        check_adapter(shapes, tensor_shapes(tmp_path))
        fused = "model.layers.0.mlp.experts.gate_up_proj.lora_A"
        assert shapes.get(fused) == (None if original else (4, rank, 32))
        served = dict(merged_weights(tmp_path, dict(PushedWeights(model).gathered()), 2.0))
        merge_adapter(model.lm)
        expected = dict(PushedWeights(_unadapted(model)).gathered())
        assert served.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(served[name], weight, rtol=1e-6, atol=1e-6)


def _unadapted(model: CausalLM) -> CausalLM:
    model.adapted = None
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch makes it while it traces an autograd function
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # and this one of a layer's input
def test_compiled_layers_train_an_adapter_of_experts_alike(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    model = _adapted(tmp_path, (*FUSED, "q_proj"))
    model.watch = watch_routers(model.lm, LearnerConfig())

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        _log_probs(model).sum().backward()
        return [weight.grad for weight in model.parameters() if weight.requires_grad]

    wanted = gradients()
    torch._dynamo.reset()
    for layer in model.lm.model.layers:
        layer.forward = torch.compile(layer.forward, backend=lambda graph, _: graph.forward, fullgraph=True)
    torch.testing.assert_close(gradients(), wanted)


@pytest.mark.parametrize(("name", "target", "reason"), [
    ("qwen3_moe", "down_proj", "has no module down_proj"),
    ("llama4_text", "experts.down_proj", "has no module experts.down_proj"),
    ("qwen3_vl_moe", "experts.down_proj", "hold .* in a form in which it cannot be adapted; omit it"),
    pytest.param("ernie4_5_vl_moe", "experts.down_proj", "cannot be adapted; omit it", marks=pytest.mark.long),
])  # fmt: skip
def test_experts_that_cannot_be_adapted_are_refused(name: str, target: str, reason: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason) as raised:
        _adapted(tmp_path, (target,))
    assert "\n" not in str(raised.value)
