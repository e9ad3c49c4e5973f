"""How the tensors of a loaded model correspond to those of its folder.

transformers holds some weights in another form than their folder does, such as fused experts, and converts them when it
loads or saves. The functions here apply the same conversions to any part of a model, such as one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.weights.folder_tensors import TIED_HEAD, read_json, tensor_shapes
from penstock_learner.model.backbone import decoder_layers

Shapes = dict[str, tuple[int, ...]]


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, and every buffer that a folder contains, such as the bias of a router."""
    yield from module.named_parameters()
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def sharded_units(lm: Any) -> Iterator[tuple[nn.Module, list[tuple[str, Tensor]]]]:
    """Yield what is sharded and pushed separately, with its tensors: the model with those that belong to no layer, then
    each layer."""
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

    renamings, converters = _split(_conversions(lm))
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
    quantized = read_json(folder / "config.json").get("quantization_config")
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
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (NotImplementedError, RuntimeError):
        return None


def _candidates(lm: Any, folder_shapes: Shapes) -> Iterator[list[Any]]:
    """The conversions that loading has used, those that loading this folder would use, and none."""
    if getattr(lm, "_weight_conversions", None) is not None:
        yield lm._weight_conversions
    yield _used_by(lm, folder_shapes)
    yield []


def _used_by(lm: Any, names: Iterable[str]) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import rename_source_key

    conversions = get_model_conversion_mapping(lm)
    for name in names:
        rename_source_key(name, *_split(conversions))
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


def _split(conversions: list[Any]) -> tuple[list[Any], list[Any]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    return renamings, [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]


def _difference(published: Shapes, wanted: Shapes) -> str:
    """The first difference between the model's tensors and the folder's, or an empty text. A tied head may lack."""
    if missing := sorted(wanted.keys() - published.keys() - {TIED_HEAD}):
        return f"the model lacks {len(missing)} of the folder's tensors, the first is {missing[0]}"
    if unknown := sorted(published.keys() - wanted.keys() - {TIED_HEAD}):
        return f"the folder lacks {len(unknown)} of the model's tensors, the first is {unknown[0]}"
    for name, shape in wanted.items():
        if published.get(name, shape) != shape:
            return f"{name} has shape {shape} in the folder and {published[name]} in the model"
    return ""
