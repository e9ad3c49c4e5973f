"""Gather weights from FSDP2 shards, with one all-gather per layer. Names are those of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from penstock_learner.model.adapter import is_pushed, pushed_name
from penstock_learner.model.backbone import decoder_layers
from penstock_learner.model.causal_lm import CausalLM


def pushed_shapes(model: CausalLM) -> list[tuple[str, tuple[int, ...]]]:
    """Return the name and the full shape of every tensor that `gathered_weights` yields, in the same order."""
    return [
        (pushed_name(name), tuple(parameter.shape))
        for _, prefix, module in _units(model)
        for name, parameter in _own_parameters(prefix, module, model)
    ]


def gathered_weights(model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight, unsharded. This is a collective: all ranks must iterate together.

    A tensor is valid until the next one is requested. When the first tensor of a layer is yielded, the layer's gather
    has finished on this rank's stream."""
    for unit, prefix, module in _units(model):
        if isinstance(unit, FSDPModule):
            unit.unshard()
        for name, parameter in _own_parameters(prefix, module, model):
            yield pushed_name(name), parameter.detach()
        if isinstance(unit, FSDPModule):
            unit.reshard()


@torch.no_grad()
def load_gathered(model: CausalLM, weight_of: Callable[[str], torch.Tensor]) -> None:
    """Copy full weights into the model: each rank takes its shard. This is a collective."""
    for unit, prefix, module in _units(model):
        if isinstance(unit, FSDPModule):
            unit.reshard()
        for name, parameter in _own_parameters(prefix, module, model):
            whole = weight_of(pushed_name(name)).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.copy_(whole)


def _units(model: CausalLM) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Yield the modules that are sharded separately, the root first."""
    yield model, "", model.lm
    list_name, layers = decoder_layers(model.lm)
    for index, layer in enumerate(layers):
        yield layer, f"{list_name}.{index}.", layer


def _own_parameters(prefix: str, module: torch.nn.Module, model: CausalLM) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of one unit. Those of the root are the parameters that belong to no layer."""
    # Only the root looks for the layers: finding them walks through the whole model.
    left_out = (f"{decoder_layers(model.lm)[0]}.",) if module is model.lm else ()
    for name, parameter in module.named_parameters():
        if is_pushed(model, prefix + name) and not name.startswith(left_out):
            yield prefix + name, parameter
