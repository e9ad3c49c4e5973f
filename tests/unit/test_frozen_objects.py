"""What the garbage collector was told to skip is freed when it has become garbage and a process loads anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from penstock.machine import freeze_loaded_objects


class Node:
    """An object that refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_spared_objects_are_skipped_and_freed_by_the_next_call_if_they_are_garbage() -> None:
    node = Node()
    alive = weakref.ref(node)
    freeze_loaded_objects()
    num_spared = gc.get_freeze_count()
    assert num_spared > 1000 and alive() is node
    del node
    gc.collect()
    assert alive() is not None, "the collector skips it"
    freeze_loaded_objects()
    assert alive() is None
