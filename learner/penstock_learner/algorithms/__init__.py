"""Advantages, losses, corrections and penalties as named pure functions over packed tensors.

Tensors have no padding: the response tokens of S sequences are concatenated into flat tensors of T entries.
`sequence_ids[T]` (int64, non-decreasing, 0..S-1) is the sequence of each token, `group_ids[S]` the prompt of each
sequence. `mask[T]` is nonzero at trained tokens, and 0 at tokens that the model did not produce, such as tool output.
A value at a masked-out token never reaches a result or a gradient, whatever it is.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from penstock.config.algorithms import check_name
from penstock.errors import ConfigError
from penstock.user_code import load_callable

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def find_function(kind: str, name: str, known: Mapping[str, FunctionT]) -> FunctionT:
    """The known function called `name`, or the one that `path/file.py:function` or `package.module:function` names.
    Raises ValueError for an unknown name, and suggests the nearest known one. Raises ConfigError for a path that cannot
    be imported, or whose function does not take two arguments."""
    check_name(kind, name, tuple(known))
    if name in known:
        return known[name]
    key = f"learner.algorithm.{kind}.name"
    function = load_callable(name, key)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{key}: {name} must take the inputs and the config: {error}") from error
    return cast(FunctionT, function)
