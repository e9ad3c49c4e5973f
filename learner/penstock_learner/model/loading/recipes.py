"""Which tensors of a folder's files make up which parameters.

Most parameters are one tensor, perhaps under another name. Some are made of several, such as the experts of a layer,
which files hold one by one and models hold together. transformers describes both as renamings and conversions, which
are used here as `from_pretrained` uses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock_learner.model.loading.tensor_files import PIECE_BYTES, TensorFiles


@dataclass(frozen=True)
class Recipe:
    """Makes one parameter or buffer of tensors in files, or several if a tensor is split."""

    target: str
    """The parameter's name, or that of the first one."""
    sources: tuple[tuple[str, str], ...]
    """The tensors, each after the pattern of the conversion that it fits."""
    conversion: Any = None
    """A `WeightConverter` of transformers. None: the parameter is the only source, unchanged."""

    @property
    def keeps_rows(self) -> bool:
        """Whether row `i` of the parameter is made of the `i`-th tensor of each pattern, and of nothing else."""
        from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

        if self.conversion is None or not isinstance(self.conversion.operations[0], MergeModulelist):
            return False
        return self.conversion.operations[0].dim == 0 and all(
            (isinstance(step, Concatenate) and step.dim > 0)
            or (isinstance(step, Transpose) and min(step.dim0, step.dim1) > 0)
            for step in self.conversion.operations[1:]
        )

    def convert(
        self, files: TensorFiles, dtype: torch.dtype, shapes: ShapesOf, config: Any, rows: range | None = None
    ) -> dict[str, Tensor]:
        """The parameters by name, in `dtype`. With `rows`, which needs `keeps_rows`, only these rows of it."""
        conversion = deepcopy(self.conversion)
        counts: dict[str, int] = {}
        for pattern, name in self.sources:
            index = counts[pattern] = counts.get(pattern, -1) + 1
            if rows is None or index in rows:
                conversion.add_tensor(self.target, name, pattern, partial(_read, files, name, dtype))
        made = conversion.convert(self.target, model=shapes, config=config)
        return {name: made_of[0] if isinstance(made_of, list) else made_of for name, made_of in made.items()}

    def pieces(
        self, files: TensorFiles, dtype: torch.dtype, shapes: ShapesOf, config: Any, start: int, stop: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Rows `start` to `stop`, a few at a time, each with the index of its first row. Needs `keeps_rows`."""
        row_bytes = math.prod(shapes.get_parameter(self.target).shape[1:]) * dtype.itemsize
        num_rows = max(1, PIECE_BYTES // row_bytes)
        for first in range(start, stop, num_rows):
            rows = range(first, min(first + num_rows, stop))
            yield first, self.convert(files, dtype, shapes, config, rows)[self.target]


class ShapesOf:
    """Answers what conversions ask a model for: the shape of a parameter."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self._state = state

    def get_parameter(self, name: str) -> Tensor:
        return self._state[name]


def recipes_of(lm: Any, names: list[str]) -> list[Recipe]:
    """The recipes for a Hugging Face model, from files with tensors of these names. Tensors that fit nothing are left
    out, as `from_pretrained` leaves them out."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(lm)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = lm.state_dict(), lm.base_model_prefix
    found: dict[str, Recipe] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            continue
        if pattern is None:
            found.setdefault(target, Recipe(target, ((name, name),)))
            continue
        begun = found.get(target, Recipe(target, (), converter_of[pattern]))
        found[target] = Recipe(target, (*begun.sources, (pattern, name)), begun.conversion)
    # Saving the model reverts the conversions that were used. Older versions of transformers revert all of them.
    lm._weight_conversions = [each for each in mapping if getattr(each, "was_used", lambda: True)()]
    return list(found.values())


def _read(files: TensorFiles, name: str, dtype: torch.dtype) -> Tensor:
    return files.whole(name).to(dtype)
