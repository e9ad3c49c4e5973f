"""Gather weights from FSDP2 shards, with one all-gather per layer. Names and shapes are those of the model's folder.

Gathering needs the memory of the largest layer, twice where transformers holds it in another form than the folder does
(fused experts). The embedding and the head, which are often larger, are gathered one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from penstock_learner.model.adapter import is_adapter, pushed_name
from penstock_learner.model.causal_lm import CausalLM
from penstock_learner.model.published_layout import (
    Shapes,
    from_published,
    own_tensors,
    published_names,
    published_shapes,
    sharded_units,
    to_published,
)
from penstock_learner.model.sharding import full_weight


@dataclass(frozen=True)
class _Place:
    """Where a module holds a tensor. FSDP puts another tensor there when it gathers the layer."""

    owner: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        held: Tensor = getattr(self.owner, self.attribute)
        return held.detach()


@dataclass(frozen=True)
class _Unit:
    """A layer, or all that belongs to no layer. Units are sharded and gathered separately."""

    sharded: nn.Module
    is_root: bool
    places: dict[str, _Place]
    """The tensors that a push sends, by their names in the model."""
    shapes: Shapes
    """Names and shapes as they are pushed, in the order in which they are gathered."""
    own_names: dict[str, str] | None
    """The name in the model of each tensor that is pushed. None if some are pushed in another form."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: place.tensor for name, place in self.places.items()}


class PushedWeights:
    """The weights of a model as a push sends them. Made once: finding names and places takes longer than gathering."""

    def __init__(self, model: CausalLM) -> None:
        self._lm = model.lm
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
                    yield from ((new, _whole(unit.places[own].tensor, dtype)) for new, own in unit.own_names.items())
            else:
                unit.sharded.unshard()
                yield from self._published(unit, unit.tensors)
                unit.sharded.reshard()

    @torch.no_grad()
    def load(self, weight_of: Callable[[str], Tensor]) -> None:
        """Copy full weights into the model: each rank takes its shard. This is a collective."""
        for unit in self._units:
            if isinstance(unit.sharded, FSDPModule):
                unit.sharded.reshard()
            if unit.own_names is None:
                whole = from_published(self._lm, {name: weight_of(name) for name in unit.shapes})
            else:
                whole = {own: weight_of(name) for name, own in unit.own_names.items()}
            for name, tensor in unit.tensors.items():
                weight = whole.pop(name).to(tensor.dtype)
                if isinstance(tensor, DTensor):
                    weight = distribute_tensor(weight, tensor.device_mesh, tensor.placements)
                tensor.copy_(weight)

    def _published(self, unit: _Unit, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of one unit under the names, and in the form, in which they are pushed."""
        if unit.own_names is None:
            yield from to_published(self._lm, tensors).items()
        else:
            yield from ((name, tensors[own]) for name, own in unit.own_names.items())


def _unit(model: CausalLM, module: nn.Module, own: Iterable[tuple[str, Tensor]]) -> _Unit:
    tensors = {name: tensor for name, tensor in own if model.adapted is None or is_adapter(name)}
    places = {}
    for name in tensors:
        owner, _, attribute = name.rpartition(".")
        places[name] = _Place(model.lm.get_submodule(owner), attribute)
    if model.adapted is None:
        shapes, new_names = published_shapes(model.lm, tensors.items()), published_names(model.lm, tensors)
    else:
        new_names = {name: pushed_name(model.adapted, name) for name in tensors}
        shapes = {new_names[name]: tuple(tensor.shape) for name, tensor in tensors.items()}
    renamed = {new: name for name, new in new_names.items()}
    own_names = {new: renamed[new] for new in shapes} if renamed.keys() == shapes.keys() else None
    is_root = module is model.lm
    return _Unit(model if is_root else module, is_root, places, shapes, own_names)


def _exact_names(model: CausalLM) -> frozenset[str]:
    parameters = {name for name, _ in model.lm.named_parameters()}
    buffers = [(name, tensor) for name, tensor in own_tensors(model.lm) if name not in parameters]
    return frozenset(published_shapes(model.lm, [pair for pair in buffers if pair[1].dtype == torch.float32]))


def _whole(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Gather one tensor, on the device of its ranks also where its shards are offloaded."""
    if not isinstance(tensor, DTensor):
        return tensor
    return full_weight(tensor.to(device=tensor.device_mesh.device_type, dtype=dtype))
