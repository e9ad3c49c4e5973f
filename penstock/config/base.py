"""The base of every config model: frozen, with unknown keys and absurd numbers refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

IS_DESCRIBED = bool(os.environ.get("PENSTOCK_DESCRIBE_CONFIG"))
"""Whether fields have their docstrings as descriptions. Only the makers of docs/config.md and of the chart's schema
read them. To find them takes a third of the import of these models, in every process of a run."""
LARGEST_NUMBERS = {"_s": 10**9, "_bytes": 2**60, "seed": 2**63 - 1, "_flops_per_rank": 10**18}
"""The largest value of a number, by the ending of its field's name. Redis keeps whole numbers in 64 bits."""
LARGEST_COUNT = 10**9
"""The largest value of every other whole number: tokens, steps, samples. A larger one is a typing mistake."""


class Config(BaseModel):
    """Base of all config models. Validators check and never mutate; derived values are properties."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=IS_DESCRIBED,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*")
    @classmethod
    def _number_is_plausible(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return value
        name = info.field_name or ""
        largest = next((limit for ending, limit in LARGEST_NUMBERS.items() if name.endswith(ending)), None)
        if largest is None and isinstance(value, int):
            largest = LARGEST_COUNT
        if largest is not None and abs(value) > largest:
            raise ValueError(f"must be at most {largest:g}, not {value:g}")
        return value

    def changed(self, values: Mapping[str, Any]) -> Self:
        """A copy with other values, given by the dotted paths of their fields. They are not validated."""
        copy = self
        for path, value in values.items():
            name, _, rest = path.partition(".")
            copy = copy.model_copy(update={name: getattr(copy, name).changed({rest: value}) if rest else value})
        return copy

    def refused(self) -> tuple[tuple[object, str], ...]:
        """Combinations of fields that are refused: a condition, and what to do. The first that holds is reported."""
        return ()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for is_refused, text in self.refused():
            if is_refused:
                raise ValueError(text)
        return self
