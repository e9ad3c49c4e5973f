"""mix64: the numpy definition against plain integers, and what a checksum of weights must tell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.weights import checksums
from penstock.weights.checksums import MIX64, XXH3, RunningChecksum, host_checksum

MASK = 2**64 - 1
words_of = st.lists(st.integers(0, MASK), min_size=1, max_size=12)


def mix64_of(words: list[int]) -> str:
    return host_checksum(MIX64, np.array(words, dtype=np.uint64).view(np.uint8))


def plain_mix64(words: list[int]) -> str:
    """As the module's table defines it, without numpy."""
    total = 0
    for index, word in enumerate(words):
        x = (word + (index + 1) * 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        total = (total + (x ^ (x >> 31))) & MASK
    return f"{total:016x}"


@given(words_of)
def test_it_is_what_its_definition_says(words: list[int]) -> None:
    assert mix64_of(words) == plain_mix64(words)


def test_chunks_of_a_large_bucket_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_CHUNK_WORDS", 64)
    words = [int(word) for word in np.random.default_rng(0).integers(0, 2**63, 1000)]
    assert mix64_of(words) == plain_mix64(words)


@given(words_of, st.data(), st.sampled_from([MIX64, XXH3]))
def test_pieces_one_after_the_other_give_the_checksum_of_the_whole(
    words: list[int], data: st.DataObject, name: str
) -> None:
    bucket = np.array(words, dtype=np.uint64).view(np.uint8)
    cut = 8 * data.draw(st.integers(0, len(words)))
    checksum = RunningChecksum(name)
    checksum.update(bucket[:cut])
    checksum.update(bucket[cut:])
    assert checksum.value == host_checksum(name, bucket)


@given(words_of, st.data())
def test_one_bit_changes_it(words: list[int], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(words) - 1))
    flipped = [*words]
    flipped[index] ^= 1 << data.draw(st.integers(0, 63))
    assert mix64_of(flipped) != mix64_of(words)


@given(words_of, st.data())
def test_two_words_that_change_places_change_it(words: list[int], data: st.DataObject) -> None:
    first, second = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    swapped = [*words]
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert (mix64_of(swapped) == mix64_of(words)) == (words[first] == words[second])


@given(words_of, st.integers(1, 4))
def test_trailing_zeros_change_it(words: list[int], num_zeros: int) -> None:
    assert mix64_of(words + [0] * num_zeros) != mix64_of(words)
