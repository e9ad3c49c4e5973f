"""Recurrent layers on the packed path: no state leaves a sequence, and the self-check refuses layers that let it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from penstock.config.learner import LoraConfig
from penstock.errors import ConfigError
from penstock_learner.model import recurrent_layers
from penstock_learner.model.adapter import add_adapter
from penstock_learner.model.architectures import is_recurrent, path_of
from penstock_learner.model.attention.packed_layout import ModelInputs, Packing
from penstock_learner.model.causal_lm import hidden_states, load_model
from penstock_learner.model.self_check import compare_with_plain, require_right
from support.tiny_architectures import ARCHITECTURES, VOCAB_SIZE, random_batch, tiny_config, tiny_model

CPU = torch.device("cpu")
LENGTHS = np.array([1, 3, 150, 64, 1, 65, 2])
"""Shorter than a convolution, as long as a chunk of the recurrences, and longer than two chunks."""
RECURRENT = [name for name in ARCHITECTURES if path_of(tiny_config(name)).is_packed and is_recurrent(tiny_config(name))]
ONE_OF_EACH = ["qwen3_next", "nemotron_h", "lfm2, convolutions", "recurrent_gemma"]


def test_every_kind_of_recurrent_layer_is_packed() -> None:
    types = {ARCHITECTURES[name][0] for name in RECURRENT}
    assert types == {
        "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "nemotron_h", "granitemoehybrid", "bamba",
        "falcon_h1", "lfm2", "lfm2_moe", "recurrent_gemma",
    }  # fmt: skip


def _gradients(model: Any, states: Tensor) -> dict[str, Tensor]:
    """The gradients of a random sum of the states."""
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
    (states * weights).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_packed_sequence_is_what_it_is_alone(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    token_ids = torch.randint(3, VOCAB_SIZE, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(0))
    each = [model.model(ids[None], use_cache=False).last_hidden_state[0] for ids in token_ids.split(LENGTHS.tolist())]
    wanted = torch.cat(each)
    own = load_model(tmp_path, torch.float32, chunk_tokens=16).lm
    packing = Packing.of(LENGTHS, CPU)
    found = hidden_states(own, token_ids, packing.columns, packing)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    gradients = _gradients(own, found)
    largest = 0.0
    for parameter, gradient in _gradients(model, wanted).items():
        spread = float(gradient.abs().max())
        largest = max(largest, spread)
        assert float((gradients[parameter] - gradient).abs().max()) <= 5e-3 * spread + 1e-4, parameter
    assert largest > 1


def _leaking(form: Any, module: Any, states: Tensor, packing: Packing) -> Any:
    """A layer that takes the whole row for one sequence."""
    return form(module, states, Packing.of(np.array([len(states)]), CPU))


@pytest.mark.parametrize(
    "name", [name if name in ONE_OF_EACH else pytest.param(name, marks=pytest.mark.long) for name in RECURRENT]
)
def test_the_self_check_refuses_a_recurrent_layer_that_goes_on_over_a_boundary(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    right = compare_with_plain(load_model(tmp_path, torch.float32, 16), "model.path", CPU, torch.float32)
    assert right.is_packed and right.ok
    leaking = {name: partial(_leaking, form) for name, form in recurrent_layers._FORMS.items()}
    monkeypatch.setattr(recurrent_layers, "_FORMS", leaking)
    recurrent_layers._packed.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"on the packed path differs from Hugging Face's own forward by \d"):
            require_right(load_model(tmp_path, torch.float32, 16), "model.path", CPU, torch.float32)
    finally:
        recurrent_layers._packed.cache_clear()


@pytest.mark.parametrize(
    ("name", "part"),
    [*[(name, "_convolve") for name in ONE_OF_EACH], ("qwen3_next", "delta_rule"), ("nemotron_h", "state_space")],
)
def test_the_self_check_refuses_a_part_of_a_layer_that_goes_on_over_a_boundary(
    name: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    kept = getattr(recurrent_layers, part)

    def leaking(*arguments: Any) -> Tensor:
        num_tokens = next(len(each) for each in arguments if isinstance(each, Tensor))
        whole = Packing.of(np.array([num_tokens]), CPU)
        result: Tensor = kept(*(whole if isinstance(each, Packing) else each for each in arguments))
        return result

    monkeypatch.setattr(recurrent_layers, part, leaking)
    assert not compare_with_plain(load_model(tmp_path, torch.float32, 16), "model.path", CPU, torch.float32).is_equal


def test_the_self_check_refuses_hugging_faces_own_layers_on_packed_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("qwen3_next").save_pretrained(tmp_path)
    monkeypatch.setattr("penstock_learner.model.causal_lm.pack_recurrent_layers", lambda lm: None)
    with pytest.raises(ConfigError, match="qwen3_next on the packed path differs"):
        require_right(load_model(tmp_path, torch.float32, 16), "model.path", CPU, torch.float32)


# ── with what training adds ──


def _trained(model: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    log_probs, _ = model(ModelInputs.of(random_batch(), CPU))
    log_probs.sum().backward()
    return log_probs.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_recomputed_layers_and_adapters_give_the_same(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, chunk_tokens=16)
    plain = _trained(model)[0]
    add_adapter(model, LoraConfig(rank=4, alpha=8))
    torch.testing.assert_close(_trained(model)[0], plain)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    wanted = _trained(model)
    assert not torch.allclose(wanted[0], plain, atol=1e-2)
    for layer in model.lm.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    torch.testing.assert_close(_trained(model), wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch makes it while it traces an autograd function
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # and this one while it goes on after a break
@pytest.mark.parametrize("name", ["qwen3_5_text", pytest.param("recurrent_gemma", marks=pytest.mark.long)])
def test_compiled_recurrent_layers_give_the_same_and_share_their_programs(name: str, tmp_path: Path) -> None:
    num_programs = []
    for num_layers in (4, 8):
        types: dict[str, Any] = {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (num_layers // 4)}
        settings = types if name == "qwen3_5_text" else {}
        tiny_model(name, num_hidden_layers=num_layers, **settings).save_pretrained(tmp_path)
        model = load_model(tmp_path, torch.float32, chunk_tokens=16)
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, inputs: list[Tensor], graphs: Any = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        wanted = _trained(model)
        torch._dynamo.reset()
        for layer in model.lm.model.layers:
            layer.forward = torch.compile(layer.forward, backend=keep)
        torch.testing.assert_close(_trained(model), wanted)
        num_programs.append(len(graphs))
    assert num_programs[0] == num_programs[1] > 0


# ── flash-linear-attention, played by its documentation ──


def _token_by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float, cu_seqlens: Tensor
) -> Tensor:
    outputs = []
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        state = torch.zeros(v.shape[2], k.shape[3], v.shape[3])
        for t in range(begin, end):
            state = state * g[0, t].exp()[:, None, None]
            written = v[0, t]
            if beta is not None:
                written = (written - torch.einsum("hk,hkv->hv", k[0, t], state)) * beta[0, t][:, None]
            state = state + k[0, t].unsqueeze(2) * written.unsqueeze(1)
            outputs.append(torch.einsum("hk,hkv->hv", q[0, t] * scale, state))
    return torch.stack(outputs).unsqueeze(0)


def _delta_kernel(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, None]:  # fmt: skip
    assert use_qk_l2norm_in_kernel and cu_seqlens.dtype == torch.long and torch.equal(cu_seqlens, cu_seqlens_cpu)
    q, k = (states * torch.rsqrt(states.square().sum(-1, keepdim=True) + 1e-6) for states in (q, k))
    return _token_by_token(q, k, v, g, beta, q.shape[3] ** -0.5, cu_seqlens), None


def _state_space_kernel(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor
) -> tuple[Tensor, None]:
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    return _token_by_token(q, k, v, g, None, scale, cu_seqlens), None


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "olmo_hybrid, negative eigenvalues", "bamba",
                                  "nemotron_h, groups"])  # fmt: skip
def test_the_kernels_are_given_what_they_document(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, chunk_tokens=16)
    wanted = _trained(model)
    delta, gla = ModuleType("fla.ops.gated_delta_rule"), ModuleType("fla.ops.simple_gla")
    delta.chunk_gated_delta_rule, gla.chunk_simple_gla = _delta_kernel, _state_space_kernel  # type: ignore[attr-defined]
    for module in (ModuleType("fla"), ModuleType("fla.ops"), delta, gla):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(recurrent_layers, "_has_kernels", lambda states: True)
    found = _trained(model)
    torch.testing.assert_close(found[0], wanted[0], atol=1e-3, rtol=1e-3)
    for gradient, right in zip(found[1], wanted[1], strict=True):
        assert float((gradient - right).abs().max()) <= 1e-2 * float(right.abs().max()) + 1e-4


@pytest.mark.parametrize(
    ("capability", "version", "missing"),
    [(9, "3.6.0", "triton 3.7.1"), (9, "3.7.0+git1", "triton 3.7.1"), (9, "3.7.1", ""), (10, "3.6.0", "")],
)
def test_kernels_that_triton_compiles_incorrectly_are_not_used(
    capability: int, version: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.simple_gla", "triton")
    modules = {name: ModuleType(name) for name in names}
    modules["triton"].__version__ = version  # type: ignore[attr-defined]
    modules["fla"].ops = modules["fla.ops"]  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (capability, 0))
    recurrent_layers.missing_kernels.cache_clear()
    try:
        found = recurrent_layers.missing_kernels()
        assert found.startswith(missing) and bool(found) == bool(missing)
    finally:
        recurrent_layers.missing_kernels.cache_clear()
