"""Strategies for damaged data, and the number of examples that each command tries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

FEW, MANY = 40, 5_000
BUDGETS = pytest.mark.parametrize(
    "num_examples", [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.long)]
)
"""`make test` tries few examples, always the same; `make test-long` tries many, others each time."""


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """Some of its bytes changed, a piece cut out, inserted or repeated, or other bytes altogether."""
    places = st.integers(0, max(0, len(data) - 1))
    changed = st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8).map(lambda c: _changed(data, c))
    cut = st.tuples(places, places).map(lambda p: data[: min(p)] + data[max(p) :])
    repeated = st.tuples(places, places).map(lambda p: data[: max(p)] + data[min(p) :])
    inserted = st.tuples(places, st.binary(max_size=40)).map(lambda p: data[: p[0]] + p[1] + data[p[0] :])
    return st.one_of(changed, cut, repeated, inserted, st.binary(max_size=200))


def _changed(data: bytes, changes: list[tuple[int, int]]) -> bytes:
    copy = bytearray(data)
    for place, value in changes:
        if copy:
            copy[place] = value
    return bytes(copy)


def json_values() -> st.SearchStrategy[Any]:
    """Any value of JSON, with numbers of any size."""
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    return st.recursive(
        plain, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3), max_leaves=8
    )


def try_examples(num_examples: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Call `check` with examples of the strategy."""

    @settings(
        max_examples=num_examples, deadline=None, database=None, derandomize=num_examples == FEW,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(example=strategy)
    def one(example: Any) -> None:
        check(example)

    one()
