"""Functions by name. A registry is immutable: a name's meaning does not depend on which modules were imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from penstock.config.algorithms import check_name
from penstock.errors import ConfigError
from penstock.user_code import load_callable

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Registry(Generic[FunctionT]):
    """The functions of one kind by name, as `ADVANTAGES.get("grpo")`. `path/file.py:function` or
    `package.module:function` names any other function."""

    def __init__(self, kind: str, functions: Mapping[str, FunctionT]) -> None:
        self._kind = kind
        self._functions = MappingProxyType(dict(functions))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._functions)

    def get(self, name: str) -> FunctionT:
        """The function called `name`. Raises ValueError for an unknown name, and suggests the nearest known one. Raises
        ConfigError for a path that cannot be imported, or whose function does not take two arguments."""
        check_name(self._kind, name, self.names)
        return self._functions[name] if name in self._functions else self._load(name)

    def _load(self, path: str) -> FunctionT:
        function = load_callable(path, f"learner.algorithm.{self._kind}.name")
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            raise ConfigError(
                f"learner.algorithm.{self._kind}.name: {path} must take the inputs and the config: {error}"
            ) from error
        return cast(FunctionT, function)
