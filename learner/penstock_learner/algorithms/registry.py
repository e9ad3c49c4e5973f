"""Functions by name. A registry is immutable: a name's meaning does not depend on which modules were imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from penstock.config.algorithms import check_name

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Registry(Generic[FunctionT]):
    """The functions of one kind by name. `package.module:function` names any other function.

    Example: `ADVANTAGES.get("grpo")`, `ADVANTAGES.get("my_project.advantages:leave_two_out")`.
    """

    def __init__(self, kind: str, functions: Mapping[str, FunctionT]) -> None:
        self._kind = kind
        self._functions = MappingProxyType(dict(functions))

    @property
    def names(self) -> tuple[str, ...]:
        """The known names, in the order in which they were registered."""
        return tuple(self._functions)

    def get(self, name: str) -> FunctionT:
        """The function called `name`. Raises ValueError for an unknown name and suggests the nearest known one."""
        check_name(self._kind, name, self.names)
        return self._functions[name] if name in self._functions else self._load(name)

    def _load(self, path: str) -> FunctionT:
        module_name, _, function_name = path.partition(":")
        try:
            function = getattr(import_module(module_name), function_name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"cannot load {self._kind} {path!r}: {error}; is it on PYTHONPATH?") from error
        if not callable(function):
            raise ValueError(f"cannot use {self._kind} {path!r}: it is a {type(function).__name__}, not a function")
        return cast(FunctionT, function)
