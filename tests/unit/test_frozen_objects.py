"""What the garbage collector was told to skip is freed when it has become garbage and a process loads anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from penstock.machine import collecting_rarely, freeze_loaded_objects


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


def test_garbage_is_collected_rarely_within_the_block_only() -> None:
    usual = gc.get_threshold()
    with pytest.raises(ImportError), collecting_rarely():
        assert gc.get_threshold()[0] > 10 * usual[0]
        raise ImportError
    assert gc.get_threshold() == usual
