"""The base of every config model: frozen, with unknown keys refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Base of all config models. Validators check and never mutate; derived values are properties."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True, protected_namespaces=()
    )
