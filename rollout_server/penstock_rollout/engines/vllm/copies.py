"""Loads a version by plain copies, where that is proven to be all that vLLM's loader does.

vLLM's reload prepares every layer for weights that have to be repacked or quantized, in Python, while decoding stands
still. Most models keep their weights as they arrive. `learn` finds out where to copy each tensor, after vLLM's own
reload of the same version, and proves four things or refuses:

- The loader only copies parts of staged tensors into parameters, and fills padding with a number. It reads no values,
  and replaces nothing of a layer.
- These copies reach every element of every parameter, and none twice.
- Each part has the values that the reload left there.
- No layer has anything else that is made from weights: no quantization, no experts, no latent attention.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

NamedTensors = Sequence[tuple[str, torch.Tensor]]
Kind = tuple[str, torch.dtype, torch.Size, tuple[int, ...]]
Place = tuple[dict[str, Any], str, int]
"""The parameters of a layer, the name of one, and where its memory begins."""

PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)
"""With these, values get into Python: a later version has others."""
KNOWN_TENSORS = ("_parameters", "_buffers", "_modules", "kv_cache")
"""Attributes of a layer whose tensors are its parameters and buffers, or not made from weights."""
COMPARED_ELEMENTS = 16 * 2**20
"""Elements that are compared at once. The comparison needs as many bytes."""


class NotPlain(Exception):
    """The model needs vLLM's loader. Says why."""


@dataclass(frozen=True)
class CopiedPart:
    """A part of a staged tensor, and the memory of a parameter that it belongs into."""

    index: int
    offset: int
    """In elements, from the beginning of the tensor."""
    size: torch.Size
    stride: tuple[int, ...]
    target: torch.Tensor

    def source(self, tensors: NamedTensors) -> torch.Tensor:
        tensor = tensors[self.index][1]
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Copies:
    """All parts of a version. `load` does what vLLM's loader does, for every version whose tensors are of the same
    kinds, as long as the parameters of the model stay where they are."""

    _kinds: list[Kind]
    _parts: list[CopiedPart]
    _places: list[Place]

    def fit(self, tensors: NamedTensors) -> bool:
        is_in_place = all(kept.get(name) is not None and kept[name].data_ptr() == at for kept, name, at in self._places)
        return is_in_place and kinds_of(tensors) == self._kinds

    @torch.no_grad()
    def load(self, tensors: NamedTensors) -> None:
        """Copies of one form are one call, which PyTorch makes few kernels of."""
        forms: dict[tuple[Any, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for part in self._parts:
            target, source = part.target, part.source(tensors)
            form = target.dtype, source.dtype, source.device, target.stride() == source.stride()
            forms[form][0].append(target)
            forms[form][1].append(source)
        for targets, sources in forms.values():
            torch._foreach_copy_(targets, sources)


def kinds_of(tensors: NamedTensors) -> list[Kind]:
    return [(name, tensor.dtype, tensor.shape, tensor.stride()) for name, tensor in tensors]


def learn(model: Any, tensors: NamedTensors) -> Copies:
    """Find the copies that load these tensors. Call it when vLLM's own reload has loaded them, and nothing decodes.
    Raises NotPlain if there is more to do, and changes nothing of the model in any case."""
    refuse_other_weights(model)
    with torch.no_grad(), _unchanged(model), _Recorder() as recorder:
        model.load_weights(iter(tensors))
    parts = list(_parts_of(recorder.copies, tensors))
    _refuse_gaps(model, [part.target for part in parts], recorder.fills)
    for part in parts:
        if _differ(part.target, part.source(tensors)):
            raise NotPlain(f"vLLM keeps other values of {tensors[part.index][0]}")
    places = [
        (module._parameters, name, parameter.data_ptr())
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    return Copies(kinds_of(tensors), parts, places)


def refuse_other_weights(model: Any) -> None:
    """Refuse layers that compute something from their weights when they are loaded."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not isinstance(method, PLAIN_METHODS):
            raise NotPlain(f"{name} has the method {type(method).__name__}")
        if isinstance(module, Attention) and _has_sinks(module.impl):
            raise NotPlain(f"{name} has sinks")
        if hasattr(module, "process_weights_after_loading") and not isinstance(module, Attention):
            raise NotPlain(f"{name} ({type(module).__name__}) prepares its weights")
        for attribute, value in vars(module).items():
            if attribute not in KNOWN_TENSORS and any(tensor.numel() > 1 for tensor in _tensors_in(value)):
                raise NotPlain(f"{name}.{attribute} is neither a parameter nor a buffer")


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensor, or those in a container."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | set | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)


def _has_sinks(implementation: Any) -> bool:
    """Whether attention has sinks, of which some kernels keep a copy. An implementation may consist of several."""
    variants = getattr(implementation, "get_impl_variants", None)
    each: Iterable[Any] = variants() if variants is not None else (implementation,)
    return any(getattr(one, name, None) is not None for one in each for name in ("sinks", "_sinks_source"))


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Undo and refuse what a loader does besides writing to tensors: new parameters, other memory, other attributes."""
    memory = [(tensor, tensor.data, tensor.data_ptr()) for tensor in [*model.parameters(), *model.buffers()]]
    attributes = [
        (kept, dict(kept))
        for module in model.modules()
        for kept in (vars(module), module._parameters, module._buffers, module._modules)
    ]
    is_changed = False
    try:
        yield
    finally:
        for tensor, data, begin in memory:
            if tensor.data_ptr() != begin or tensor.dtype != data.dtype or tensor.stride() != data.stride():
                tensor.data, is_changed = data, True
        for kept, before in attributes:
            if kept.keys() != before.keys() or any(kept[name] is not value for name, value in before.items()):
                kept.clear()
                kept.update(before)
                is_changed = True
    if is_changed:
        raise NotPlain("its loader replaces something of a layer")


class _Recorder(TorchDispatchMode):
    """Records the copies and fills of a loader, and does not execute them. Other operations that write,
    and operations that read values, are refused."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.fills: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
            return args[0]
        if func in FILLS:
            self.fills.append(args[0])
            return args[0]
        if func in READS:
            raise NotPlain("its loader reads values")
        if func._schema.is_mutable:
            raise NotPlain(f"its loader calls {func}")
        return func(*args, **(kwargs or {}))


def _parts_of(copies: Iterable[tuple[torch.Tensor, torch.Tensor]], tensors: NamedTensors) -> Iterator[CopiedPart]:
    """The parts that were copied. A source is recognized by its address, because tensors are views into buckets."""
    begins = sorted((tensor.data_ptr(), index) for index, (_, tensor) in enumerate(tensors) if tensor.numel())
    for target, source in copies:
        at = bisect.bisect_right(begins, source.data_ptr(), key=lambda begin: begin[0]) - 1
        index = begins[at][1] if at >= 0 else 0
        tensor = tensors[index][1]
        offset, remainder = divmod(source.data_ptr() - tensor.data_ptr(), tensor.element_size())
        last = offset + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
        if at < 0 or remainder or last >= tensor.numel() or source.device != tensor.device:
            raise NotPlain("its loader computes what it copies")
        if source.dtype != tensor.dtype or source.shape != target.shape:
            raise NotPlain(f"its loader changes the form of {tensors[index][0]}")
        yield CopiedPart(index, offset, source.shape, source.stride(), target.detach())


def _refuse_gaps(model: Any, copied: list[torch.Tensor], filled: list[torch.Tensor]) -> None:
    """Refuse copies that leave an element of a parameter out, or write one of any tensor twice."""
    written: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for target in [*copied, *filled]:
        if not target.is_contiguous():
            raise NotPlain("its loader writes to memory with gaps")
        if target.numel():
            begin = target.data_ptr()
            written[_memory_of(target)].append((begin, begin + target.nbytes))
    for pieces in written.values():
        pieces.sort()
        if any(begin < end for (_, end), (begin, _) in itertools.pairwise(pieces)):
            raise NotPlain("its loader writes to the same memory twice")
    for name, parameter in model.named_parameters():
        begin = parameter.data_ptr()
        borders = [begin, *(border for piece in written[_memory_of(parameter)] for border in piece)]
        borders.append(begin + parameter.nbytes)
        if not parameter.is_contiguous() or borders[::2] != borders[1::2]:
            raise NotPlain(f"its loader skips a part of {name}")


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dim() == 0:
        return not torch.equal(one, other.to(one))
    num_rows = max(1, COMPARED_ELEMENTS * len(one) // max(one.numel(), 1))
    pieces = zip(one.split(num_rows), other.split(num_rows), strict=True)
    return any(not torch.equal(mine, theirs.to(mine)) for mine, theirs in pieces)
