"""mix64: against published outputs of SplitMix64, and the corruptions that a checksum of weights must detect."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.weights import transports as manifest
from penstock.weights.transports import MIX64, XXH3_PIECES, RunningChecksum, host_checksum

MASK = 2**64 - 1
PUBLISHED = {
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B],
    1234567: [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ],
}  # fmt: skip
"""The first outputs of Vigna's SplitMix64 for two seeds, as its reference implementation prints them."""
words_of = st.lists(st.integers(0, MASK), min_size=1, max_size=12)


def mix64_of(words: list[int]) -> str:
    return host_checksum(MIX64, np.array(words, dtype=np.uint64).view(np.uint8))


def as_text(total: int) -> str:
    return f"{total & MASK:016x}"


@pytest.mark.parametrize(("seed", "outputs"), PUBLISHED.items())
def test_equal_words_give_the_sum_of_the_published_numbers(seed: int, outputs: list[int]) -> None:
    """Word i is added to i + 1 steps of the generator: it gives output i of the generator seeded with the word."""
    for count in range(1, len(outputs) + 1):
        assert mix64_of([seed] * count) == as_text(sum(outputs[:count]))


@given(st.lists(st.sampled_from(list(PUBLISHED)), min_size=1, max_size=5))
def test_each_word_gives_the_published_number_of_its_place(words: list[int]) -> None:
    assert mix64_of(words) == as_text(sum(PUBLISHED[word][index] for index, word in enumerate(words)))


@given(st.integers(1, 200), st.integers(1, 70))
def test_chunks_of_a_large_bucket_add_up(num_words: int, chunk_words: int) -> None:
    words = [int(word) for word in np.random.default_rng(num_words).integers(0, 2**63, num_words)]
    whole = mix64_of(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "_CHUNK_WORDS", chunk_words)
        assert mix64_of(words) == whole


@given(words_of, st.data(), st.sampled_from([MIX64, XXH3_PIECES]))
def test_pieces_one_after_the_other_give_the_checksum_of_the_whole(
    words: list[int], data: st.DataObject, name: str
) -> None:
    bucket = np.array(words, dtype=np.uint64).view(np.uint8)
    cut = 8 * data.draw(st.integers(0, len(words)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "CHECKSUM_PIECE_BYTES", 24)
        checksum = RunningChecksum(name)
        checksum.update(bucket[:cut])
        checksum.update(bucket[cut:])
        assert checksum.value == host_checksum(name, bucket)


def test_pieces_are_hashed_one_by_one_and_their_order_counts() -> None:
    pieces = [np.full(manifest.CHECKSUM_PIECE_BYTES, number, dtype=np.uint8) for number in (1, 2)]
    digests = [manifest.piece_digest(piece) for piece in [*pieces, pieces[0][:8]]]
    bucket = np.concatenate([*pieces, pieces[0][:8]])
    assert host_checksum(XXH3_PIECES, bucket) == manifest.combined_digests(digests)
    assert host_checksum(XXH3_PIECES, bucket) != manifest.combined_digests(digests[::-1])


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
