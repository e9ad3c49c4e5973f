"""The weights of a model as a push sends them: gathered from FSDP2 shards, under the names of the model's folder.

transformers holds some weights in another form than their folder does, such as fused experts, and converts them when it
loads or saves. The functions here apply the same conversions to any part of a model, such as one layer.

There is one all-gather per layer. It needs the memory of the largest layer, twice where the folder's form differs. The
embedding and the head, which are often larger, are gathered one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from penstock.errors import ConfigError
from penstock.weights.folder_tensors import is_head, language_fields, read_json, tensor_shapes
from penstock.weights.transports import A_SUFFIX, B_SUFFIX
from penstock_learner.model.causal_lm import CausalLM
from penstock_learner.model.loading import (
    LORA_A,
    LORA_B,
    OwnPart,
    decoder_layers,
    is_adapter,
    make_lm,
    split_conversions,
)

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Unit:
    """A layer, or all that belongs to no layer. Units are sharded and gathered separately."""

    sharded: nn.Module
    is_root: bool
    places: dict[str, tuple[nn.Module, str]]
    """For each tensor that a push sends, by its name in the model, the module and the attribute that hold it. FSDP puts
    another tensor there when it gathers the layer."""
    shapes: Shapes
    """Names and shapes as they are pushed, in the order in which they are gathered."""
    own_names: dict[str, str] | None
    """The name in the model of each tensor that is pushed. None if some are pushed in another form."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(owner, attribute).detach() for name, (owner, attribute) in self.places.items()}


class PushedWeights:
    """The weights of a model as a push sends them. Made once: finding names and places takes longer than gathering."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._units = [_unit(model, module, own) for module, own in sharded_units(model.lm)]
        self.shapes = [pair for unit in self._units for pair in unit.shapes.items()]
        """Name and full shape of every tensor that `gathered` yields, in the same order."""
        self.exact = frozenset() if model.adapted is not None else _exact_names(model)
        """Names of the tensors that are pushed in float32 whatever `model.dtype` is: the buffers, such as routers'
        biases. Engines keep them in float32, and rounding them would change which experts are chosen."""

    def gathered(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight, unsharded. This is a collective: all ranks must iterate together. A tensor is valid until
        the next one is requested. When the first tensor of a layer is yielded, the layer's gather has finished on this
        rank's stream. Layers are gathered in the type in which the model computes; `dtype` names it for the weights
        outside of layers, which otherwise keep the type of their shards."""
        for unit in self._units:
            if not isinstance(unit.sharded, FSDPModule):
                yield from self._published(unit, unit.tensors)
            elif unit.is_root:
                unit.sharded.reshard()
                if unit.own_names is None:
                    yield from self._published(unit, {n: _whole(t, dtype) for n, t in unit.tensors.items()})
                else:
                    tensors = unit.tensors
                    yield from ((new, _whole(tensors[own], dtype)) for new, own in unit.own_names.items())
            else:
                for part in _sharded_parts(unit.sharded):
                    part.unshard()
                yield from self._published(unit, {name: full_weight(tensor) for name, tensor in unit.tensors.items()})
                for part in _sharded_parts(unit.sharded):
                    part.reshard()

    @torch.no_grad()
    def load(self, weight_of: Callable[[str], Tensor]) -> None:
        """Copy full weights into the model: each rank takes its shard. This is a collective."""
        for unit in self._units:
            for part in _sharded_parts(unit.sharded):
                part.reshard()
            if unit.own_names is None:
                published = {name: weight_of(name) for name in unit.shapes}
                whole = _from_published_unit(self._model, unit.tensors, published)
            else:
                whole = {own: weight_of(name) for name, own in unit.own_names.items()}
            for name, tensor in unit.tensors.items():
                OwnPart.of(tensor).take(whole.pop(name))

    def _published(self, unit: _Unit, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of one unit under the names, and in the form, in which they are pushed."""
        if unit.own_names is None:
            yield from _to_published_unit(self._model, tensors).items()
        else:
            yield from ((name, tensors[own]) for name, own in unit.own_names.items())


def _unit(model: CausalLM, module: nn.Module, own: Iterable[tuple[str, Tensor]]) -> _Unit:
    tensors = {name: tensor for name, tensor in own if model.adapted is None or is_adapter(name)}
    places = {}
    for name in tensors:
        owner, _, attribute = name.rpartition(".")
        places[name] = (model.lm.get_submodule(owner), attribute)
    placeholders = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    published = _to_published_unit(model, placeholders)
    shapes = {name: tuple(tensor.shape) for name, tensor in published.items()}
    names = {id(placeholder): name for name, placeholder in placeholders.items()}
    own_names = {new: names[id(tensor)] for new, tensor in published.items() if id(tensor) in names}
    is_root = module is model.lm
    is_same = len(own_names) == len(published) == len(tensors)
    return _Unit(model if is_root else module, is_root, places, shapes, own_names if is_same else None)


def _sharded_parts(module: nn.Module) -> list[FSDPModule]:
    """The module and what is in it, as far as FSDP2 gathers them separately: a layer, and experts that ranks share."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _exact_names(model: CausalLM) -> frozenset[str]:
    parameters = {name for name, _ in model.lm.named_parameters()}
    buffers = [(name, tensor) for name, tensor in own_tensors(model.lm) if name not in parameters]
    return frozenset(published_shapes(model.lm, [pair for pair in buffers if pair[1].dtype == torch.float32]))


def _whole(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Gather one tensor, on the device of its ranks also where its shards are offloaded."""
    if not isinstance(tensor, DTensor):
        return tensor
    return full_weight(tensor.to(device=tensor.device_mesh.device_type, dtype=dtype))


def full_weight(parameter: Tensor) -> Tensor:
    """The whole parameter. Collective where it is sharded: every rank calls it, in the same order."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _to_published_unit(model: CausalLM, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the tensors of a layer, or of its adapter, to what is pushed of them."""
    if model.adapted is None:
        return to_published(model.lm, tensors)
    published: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        weight, suffix = adapted_weight(model.lm, name), A_SUFFIX if LORA_A in name else B_SUFFIX
        if weight in model.adapted:
            published[model.adapted[weight] + suffix] = tensor
        elif suffix == A_SUFFIX:
            up = tensors[name.replace(LORA_A, LORA_B)]
            published |= published_factors(model.lm, weight, *expert_factors(model.lm, weight, tensor, up))
    return published


def _from_published_unit(
    model: CausalLM, tensors: Mapping[str, Tensor], published: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The inverse, for tensors of these names and shapes."""
    if model.adapted is None:
        return from_published(model.lm, published)
    own: dict[str, Tensor] = {}
    lows, ups = (
        from_published(model.lm, {name.removesuffix(end): published[name] for name in published if name.endswith(end)})
        for end in (A_SUFFIX, B_SUFFIX)
    )
    for name, tensor in tensors.items():
        weight = adapted_weight(model.lm, name)
        if weight in model.adapted:
            own[name] = published[model.adapted[weight] + (A_SUFFIX if LORA_A in name else B_SUFFIX)]
        elif _is_transposed(model.lm, weight):
            turned = ups[weight] if LORA_A in name else lows[weight]
            own[name] = _as_peft(turned.transpose(1, 2), tensor, is_up=LORA_B in name)
        else:
            own[name] = _as_peft((lows if LORA_A in name else ups)[weight], tensor, is_up=LORA_B in name)
    return own


# ── adapters of experts: peft has a matrix for all experts of a layer, and a push one for each weight of the folder ──


def adapted_weight(lm: Any, name: str) -> str:
    """The name of the weight that a matrix of an adapter changes."""
    owner = name.partition(".lora_")[0]
    return f"{owner.replace('.base_layer', '')}.{getattr(lm.get_submodule(owner), 'parameter_name', 'weight')}"


def expert_factors(lm: Any, weight: str, low: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Two factors [experts, rank, in] and [experts, out, rank] of what peft's matrices [experts · rank, in] and
    [out, rank · experts] add to a fused weight [experts, out, in]."""
    num_experts = _parameter(lm, weight).shape[0]
    low, up = low.unflatten(0, (num_experts, -1)), up.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
    return (up.transpose(1, 2), low.transpose(1, 2)) if _is_transposed(lm, weight) else (low, up)


def published_factors(lm: Any, weight: str, low: Tensor, up: Tensor) -> dict[str, Tensor]:
    """The factors of each tensor of the folder that holds a part of the rows of a fused weight. Each has the same
    `low`, so it is repeated for all of them, and divided as the weight is."""
    ups = to_published(lm, {weight: up})
    num_parts = len(ups) // len(up) if len(ups) > 1 else 1
    lows = to_published(lm, {weight: low.repeat(1, num_parts, 1)})
    if len(ups) > 1:  # transformers squeezes what it splits, also a rank of one
        lows, ups = (
            {name: part.reshape(-1, whole.shape[2]) for name, part in parts.items()}
            for parts, whole in ((lows, low), (ups, up))
        )
    return {name + A_SUFFIX: lows[name] for name in lows} | {name + B_SUFFIX: ups[name] for name in ups}


def _as_peft(factor: Tensor, like: Tensor, *, is_up: bool) -> Tensor:
    if is_up:
        return factor.permute(1, 2, 0).reshape(like.shape)
    return factor[:, : like.shape[0] // len(factor)].reshape(like.shape)


def _parameter(lm: Any, weight: str) -> Tensor:
    """A parameter by its name without an adapter."""
    module, _, name = weight.rpartition(".")
    found: Tensor = getattr(_experts_of(lm, module), name)
    return found


def _experts_of(lm: Any, name: str) -> Any:
    module = lm.get_submodule(name)
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _is_transposed(lm: Any, weight: str) -> bool:
    return bool(_experts_of(lm, weight.rpartition(".")[0]).is_transposed)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, and every buffer that a folder contains, such as the bias of a router."""
    yield from module.named_parameters()
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def sharded_units(lm: Any) -> Iterator[tuple[nn.Module, list[tuple[str, Tensor]]]]:
    """Yield what is sharded and pushed separately, with its tensors: the model with the tensors of no layer, then each
    layer."""
    list_name, layers = decoder_layers(lm)
    yield lm, [(name, tensor) for name, tensor in own_tensors(lm) if not name.startswith(f"{list_name}.")]
    for index, layer in enumerate(layers):
        yield layer, [(f"{list_name}.{index}.{name}", tensor) for name, tensor in own_tensors(layer)]


def to_published(lm: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors of the model, layers whole, to the folder's names and shapes. Results are views where possible.
    Meta tensors give the shapes without any memory."""
    from transformers.core_model_loading import revert_weight_conversion

    published: dict[str, Tensor] = revert_weight_conversion(lm, dict(tensors))
    return published


def from_published(lm: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors of the folder to the model's names and shapes: the inverse of `to_published`."""
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    renamings, converters = split_conversions(_conversions(lm))
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    collected: dict[str, Any] = {}
    for name in sorted(tensors, key=dot_natural_key):
        own_name, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            transform, pattern = collected.setdefault(own_name, WeightRenaming(name, own_name)), name
        else:
            transform = collected.setdefault(own_name, deepcopy(by_pattern[pattern]))
        transform.add_tensor(own_name, name, pattern, tensors[name])
    return {
        name: value[0] if isinstance(value, list) else value
        for own_name, transform in collected.items()
        for name, value in transform.convert(own_name, model=lm, config=lm.config).items()
    }


def published_names(lm: Any, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """The name in the folder of each weight that has the same form there. Weights of another form are skipped."""
    placeholders = {name: torch.empty(weight.shape, device="meta") for name, weight in weights.items()}
    names = {id(placeholder): name for name, placeholder in placeholders.items()}
    published = to_published(lm, placeholders).items()
    return {names[id(tensor)]: name for name, tensor in published if id(tensor) in names}


def published_shapes(lm: Any, tensors: Iterable[tuple[str, Tensor]]) -> Shapes:
    """The names and shapes that `to_published` gives these tensors, in the same order."""
    placeholders = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors}
    return {name: tuple(tensor.shape) for name, tensor in to_published(lm, placeholders).items()}


def fit_to_folder(lm: Any, folder: Path, key: str) -> None:
    """Choose the conversions that give the folder's names and shapes. Raises ConfigError, which names the config's
    `key`, if none do: engines could not load the weights that the learner pushes."""
    wanted = tensor_shapes(folder)
    problem = ""
    for conversions in _candidates(lm, wanted):
        lm._weight_conversions = conversions
        published: Shapes = {}
        for _, own in sharded_units(lm):
            published |= published_shapes(lm, own)
        found = _difference(published, wanted)
        if not found:
            return
        problem = problem or found
    quantized = language_fields(read_json(folder / "config.json")).get("quantization_config")
    advice = "use another model"
    if quantized:
        method = quantized.get("quant_method", "a quantized form")
        advice = f"it is stored as {method}: load it in bfloat16, save it with save_pretrained, and give that folder"
    raise ConfigError(f"{key} {folder} has weights in a form that cannot be pushed to engines: {problem}; {advice}")


def model_without_weights(folder: Path) -> Any | None:
    """The folder's causal model on the meta device. None for a model that cannot be built without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    try:
        return make_lm(AutoModelForCausalLM, config)
    except (NotImplementedError, RuntimeError):
        return None


def _candidates(lm: Any, folder_shapes: Shapes) -> Iterator[list[Any]]:
    """The conversions that loading has used, the ones that loading this folder would use, and none."""
    if getattr(lm, "_weight_conversions", None) is not None:
        yield lm._weight_conversions
    yield _used_by(lm, folder_shapes)
    yield []


def _used_by(lm: Any, names: Iterable[str]) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import rename_source_key

    conversions = get_model_conversion_mapping(lm)
    for name in names:
        rename_source_key(name, *split_conversions(conversions))
    return [conversion for conversion in conversions if conversion.was_used()]


def _conversions(lm: Any) -> list[Any]:
    """What `revert_weight_conversion` reverts."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    chosen: list[Any] | None = getattr(lm, "_weight_conversions", None)
    if chosen is not None:
        return chosen
    default = get_model_conversion_mapping(lm, add_legacy=False)
    return [conversion for conversion in default if not isinstance(conversion, PrefixChange)]


def _difference(published: Shapes, wanted: Shapes) -> str:
    """The first difference between the model's tensors and the folder's, or an empty text. A tied head may lack."""
    if missing := sorted(name for name in wanted.keys() - published.keys() if not is_head(name)):
        return f"the model lacks {len(missing)} of the folder's tensors, the first is {missing[0]}"
    if unknown := sorted(name for name in published.keys() - wanted.keys() if not is_head(name)):
        return f"the folder lacks {len(unknown)} of the model's tensors, the first is {unknown[0]}"
    for name, shape in wanted.items():
        if published.get(name, shape) != shape:
            return f"{name} has shape {shape} in the folder and {published[name]} in the model"
    return ""
