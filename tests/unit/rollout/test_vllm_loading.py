"""Tests of loading by copies: what is learned from a loader, and which loaders and models are refused.

vLLM is not installed here. Models are torch's, with loaders as vLLM's layers have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.vllm_stand_ins import imported_core

HIDDEN, VOCAB, PADDED, RANK, NUM_RANKS = 8, 10, 16, 1, 2
SHAPES = {"embed": (VOCAB, HIDDEN), "q": (6, HIDDEN), "k": (2, HIDDEN), "down": (HIDDEN, 12), "norm": (HIDDEN,)}
Tensors = list[tuple[str, torch.Tensor]]


class Plain:
    """A method of layers whose weights stay as they are."""


class Attention(torch.nn.Module):
    def __init__(self, sinks: torch.Tensor | None = None) -> None:
        super().__init__()
        self.impl = SimpleNamespace(sinks=sinks)
        self.kv_cache = torch.zeros(4)
        self.scale = torch.tensor(1.0)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        pass


class Layer(torch.nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full(shape, -1.0), requires_grad=False)
        self.quant_method: Any = Plain()


class Model(torch.nn.Module):
    """Rank 1 of 2: an embedding with padding, queries and keys in one matrix, and half the columns of another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qk, self.down, self.norm = Layer(PADDED, HIDDEN), Layer(8, HIDDEN), Layer(HIDDEN, 6), Layer(8)
        self.head = self.embed
        self.attention = Attention()
        self.change: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight
        self.also: Callable[[], object] = lambda: None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in ((name, self.change(weight)) for name, weight in weights):
            if name == "embed":
                self.embed.weight[:VOCAB].data.copy_(weight)
                self.embed.weight[VOCAB:].data.fill_(0)
            elif name == "q":
                self.qk.weight.data.narrow(0, 0, 6).copy_(weight)
            elif name == "k":
                self.qk.weight.data.narrow(0, 6, 2).copy_(weight)
            elif name == "down":
                self.down.weight.data.copy_(weight.narrow(1, RANK * 6, 6))
            elif name == "norm":
                self.norm.weight.data.copy_(weight)
        self.also()


def version(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """Tensors that are views into one bucket, as a stage has them."""
    bucket = torch.randn(sum(torch.Size(shape).numel() for shape in SHAPES.values()), dtype=dtype).mul_(seed)
    pieces = bucket.split([torch.Size(shape).numel() for shape in SHAPES.values()])
    return [(name, piece.reshape(shape)) for (name, shape), piece in zip(SHAPES.items(), pieces, strict=True)]


def values_of(model: Model) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def objects_of(model: Model) -> list[tuple[str, int, int, list[str]]]:
    """Which tensors the layers have, where their memory is, and which attributes there are."""
    named = [*model.named_parameters(), *model.named_buffers()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    return [(name, id(tensor), tensor.data_ptr(), sum(attributes, [])) for name, tensor in named]


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def check_copies(copies: Any, model: Model, first: Tensors, second: Tensors) -> None:
    """Copies that are learned from the first version load the second as the loader does."""
    model.load_weights(second)
    wanted = values_of(model)
    model.load_weights(first)
    loaded = values_of(model)
    learned = copies.learn(model, first)
    assert_equal(values_of(model), loaded)  # learning writes nothing
    assert learned.fit(second)
    learned.load(second)
    assert_equal(values_of(model), wanted)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    methods = {"UnquantizedLinearMethod": Plain, "UnquantizedEmbeddingMethod": Plain}
    with imported_core(monkeypatch, Attention=Attention, **methods) as module:
        yield module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_load_what_the_loader_loads(copies: Any, dtype: torch.dtype) -> None:
    check_copies(copies, Model().to(dtype), version(1, dtype), version(2, dtype))


def test_copies_cast_as_the_loader_does(copies: Any) -> None:
    check_copies(copies, Model().to(torch.bfloat16), version(1), version(2))


def test_views_of_tensors_are_copied(copies: Any) -> None:
    """A loader may transpose: the memory is that of the stage."""

    def transposed(seed: int) -> Tensors:
        return [(name, tensor.t().contiguous() if name == "down" else tensor) for name, tensor in version(seed)]

    model = Model()
    model.change = lambda weight: weight.t() if weight.shape == SHAPES["down"][::-1] else weight
    check_copies(copies, model, transposed(1), transposed(2))


def test_other_tensors_do_not_fit(copies: Any) -> None:
    model, first = Model(), version(1)
    model.load_weights(first)
    learned = copies.learn(model, first)
    assert not learned.fit(first[:-1])
    assert not learned.fit(version(1, torch.bfloat16))
    assert not learned.fit([(name + "_", tensor) for name, tensor in first])
    assert not learned.fit([(name, tensor.reshape(-1)) for name, tensor in first])
    assert not learned.fit([(name, tensor.t().contiguous().t()) for name, tensor in first])


def _move(model: Model) -> None:
    model.norm.weight.data = model.norm.weight.data.clone()


def _replace(model: Model) -> None:
    model.norm.weight = torch.nn.Parameter(model.norm.weight.clone(), requires_grad=False)


def _remove(model: Model) -> None:
    del model.norm.weight


@pytest.mark.parametrize("change", [_move, _replace, _remove])
def test_a_model_whose_parameters_are_elsewhere_does_not_fit(copies: Any, change: Callable[[Model], None]) -> None:
    model, first = Model(), version(1)
    model.load_weights(first)
    learned = copies.learn(model, first)
    change(model)
    assert not learned.fit(first)


def test_tensors_of_several_types_are_loaded(copies: Any) -> None:
    def mixed(seed: int) -> Tensors:
        return [(name, tensor.bfloat16() if name == "norm" else tensor) for name, tensor in version(seed)]

    model = Model()
    model.qk.to(torch.bfloat16)
    check_copies(copies, model, mixed(1), mixed(2))


def _repack(model: Model) -> None:
    model.qk.weight.data = model.qk.weight.data.flip(0)


def _skip_keys(model: Model) -> None:
    load = model.load_weights
    model.load_weights = lambda weights: load((name, w) for name, w in weights if name != "k")  # type: ignore[method-assign]


def _load_keys_twice(model: Model) -> None:
    load = model.load_weights
    model.load_weights = lambda weights: load(  # type: ignore[method-assign]
        (each, w) for name, w in weights for each in ([name, name] if name == "k" else [name])
    )


def _also(what: Callable[[Model], object]) -> Callable[[Model], object]:
    """The loader also does this."""
    return lambda model: setattr(model, "also", lambda: what(model))


def _parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape), requires_grad=False)


def _fill_from_value(model: Model) -> None:
    model.norm.register_buffer("largest", torch.zeros(1))
    model.also = lambda: model.norm.largest.fill_(float(model.norm.weight.max()))


def _add_variants(model: Model) -> None:
    variants = [SimpleNamespace(sinks=None), SimpleNamespace(sinks=torch.ones(2))]
    model.attention.impl = SimpleNamespace(get_impl_variants=lambda: variants)


REFUSED: dict[str, tuple[Callable[[Model], object], str]] = {
    "values that are kept in another order": (_repack, "vLLM keeps other values of q"),
    "a part that is not loaded": (_skip_keys, "skips a part of qk.weight"),
    "a part that is loaded twice": (_load_keys_twice, "writes to the same memory twice"),
    "a new parameter": (_also(lambda model: setattr(model.norm, "weight", _parameter(8))), "replaces something"),
    "a new attribute": (_also(lambda model: setattr(model.norm, "note", 1)), "replaces something"),
    "other memory": (_also(lambda model: setattr(model.norm.weight, "data", torch.ones(8))), "replaces something"),
    "values that are read": (
        lambda model: setattr(model, "change", lambda w: w if w.flatten()[0].item() else w), "reads values",
    ),
    "a buffer that is filled with a value of the version": (_fill_from_value, "reads values"),
    "values that are computed": (lambda model: setattr(model, "change", lambda w: w * 2), "computes what it copies"),
    "an operation that writes": (_also(lambda model: model.norm.weight.data.add_(1)), "its loader calls aten.add_"),
    "another method": (lambda model: setattr(model.qk, "quant_method", object()), "qk has the method object"),
    "a copy of weights": (lambda model: setattr(model.qk, "packed", torch.ones(4)), "qk.packed is neither"),
    "a list of copies": (lambda model: setattr(model.qk, "packed", {"a": [torch.ones(4)]}), "qk.packed is neither"),
    "sinks": (lambda model: setattr(model, "attention", Attention(torch.ones(2))), "attention has sinks"),
    "sinks of one of several kernels": (_add_variants, "attention has sinks"),
    "a layer that prepares its weights": (
        lambda model: setattr(model.qk, "process_weights_after_loading", lambda dtype: None), "prepares its weights",
    ),
    "a parameter that no tensor has": (
        lambda model: model.register_parameter("more", torch.nn.Parameter(torch.ones(2))), "skips a part of more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_models_with_more_to_load_are_refused(copies: Any, what: str) -> None:
    """The model stays as it was."""
    model, tensors = Model(), version(1)
    model.load_weights(tensors)
    change, why = REFUSED[what]
    change(model)
    before, objects = values_of(model), objects_of(model)
    with pytest.raises(copies.NotPlain, match=why):
        copies.learn(model, tensors)
    assert_equal(values_of(model), before)
    assert objects_of(model) == objects
