"""Gather weights from FSDP2 shards, with one all-gather per layer. Names and shapes are those of the model's folder.

Nothing is held for longer than its layer, so gathering needs the memory of the largest layer, twice where transformers
holds it in another form than the folder does (fused experts). The embedding and the head are often larger than a layer,
so they are gathered one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from penstock_learner.model.adapter import is_adapter, pushed_name
from penstock_learner.model.backbone import decoder_layers
from penstock_learner.model.causal_lm import CausalLM
from penstock_learner.model.published_layout import from_published, own_tensors, published_shapes, to_published
from penstock_learner.model.sharding import full_weight


def pushed_shapes(model: CausalLM) -> list[tuple[str, tuple[int, ...]]]:
    """Return the name and the full shape of every tensor that `gathered_weights` yields, in the same order."""
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for _, prefix, module in _units(model):
        own = _own_tensors(prefix, module, model)
        if model.adapted is not None:
            shapes += [(pushed_name(model.adapted, name), tuple(tensor.shape)) for name, tensor in own]
        else:
            shapes += published_shapes(model.lm, own).items()
    return shapes


def exact_names(model: CausalLM) -> frozenset[str]:
    """Names of the tensors that are pushed in float32 whatever `model.dtype` is: the buffers, such as routers' biases.

    Engines keep them in float32, and rounding them would change which experts are chosen."""
    if model.adapted is not None:
        return frozenset()
    parameters = {name for name, _ in model.lm.named_parameters()}
    buffers = [(name, tensor) for name, tensor in own_tensors(model.lm) if name not in parameters]
    return frozenset(published_shapes(model.lm, [pair for pair in buffers if pair[1].dtype == torch.float32]))


def gathered_weights(model: CausalLM, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight, unsharded. This is a collective: all ranks must iterate together.

    A tensor is valid until the next one is requested. When the first tensor of a layer is yielded, the layer's gather
    has finished on this rank's stream. Layers are gathered in the type in which the model computes; `dtype` names it
    for the weights outside of layers, which otherwise keep the type of their shards."""
    for unit, prefix, module in _units(model):
        if not isinstance(unit, FSDPModule):
            yield from _published(model, _own_tensors(prefix, module, model))
        elif module is model.lm:
            unit.reshard()
            for name, tensor in _own_tensors(prefix, module, model):
                yield from _published(model, [(name, _whole(tensor, dtype))])
        else:
            unit.unshard()
            yield from _published(model, _own_tensors(prefix, module, model))
            unit.reshard()


def _published(model: CausalLM, own: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of one unit under the names, and in the form, in which they are pushed."""
    tensors = {name: tensor.detach() for name, tensor in own}
    if model.adapted is not None:
        yield from ((pushed_name(model.adapted, name), tensor) for name, tensor in tensors.items())
    else:
        yield from to_published(model.lm, tensors).items()


def _whole(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Gather one tensor, on the device of its ranks also where its shards are offloaded."""
    if not isinstance(tensor, DTensor):
        return tensor
    part = tensor.detach().to(device=tensor.device_mesh.device_type, dtype=dtype)
    return full_weight(part)


@torch.no_grad()
def load_gathered(model: CausalLM, weight_of: Callable[[str], Tensor]) -> None:
    """Copy full weights into the model: each rank takes its shard. This is a collective."""
    for unit, prefix, module in _units(model):
        if isinstance(unit, FSDPModule):
            unit.reshard()
        own = dict(_own_tensors(prefix, module, model))
        if model.adapted is not None:
            whole = {name: weight_of(pushed_name(model.adapted, name)) for name in own}
        else:
            names = published_shapes(model.lm, own.items())
            whole = from_published(model.lm, {name: weight_of(name) for name in names})
        for name, tensor in own.items():
            weight = whole.pop(name).to(tensor.dtype)
            if isinstance(tensor, DTensor):
                weight = distribute_tensor(weight, tensor.device_mesh, tensor.placements)
            tensor.copy_(weight)


def _units(model: CausalLM) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Yield the modules that are sharded separately, the root first."""
    yield model, "", model.lm
    list_name, layers = decoder_layers(model.lm)
    for index, layer in enumerate(layers):
        yield layer, f"{list_name}.{index}.", layer


def _own_tensors(prefix: str, module: torch.nn.Module, model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one unit that a push sends. Those of the root are the tensors that belong to no layer."""
    # Only the root looks for the layers: finding them walks through the whole model.
    left_out = (f"{decoder_layers(model.lm)[0]}.",) if module is model.lm else ()
    for name, tensor in own_tensors(module):
        if not name.startswith(left_out) and (model.adapted is None or is_adapter(name)):
            yield prefix + name, tensor
