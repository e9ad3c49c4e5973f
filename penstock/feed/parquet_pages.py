"""How much the columns of a Parquet file hold, according to the headers of their pages.

The footer has the same numbers, but no reader compares them: a file of unknown origin can say there that it is small.
The headers of the pages are what the reader allocates memory for. They are Thrift structures in the compact protocol.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

MAX_PAGES = 100_000
"""In a whole file. Pages usually have a megabyte."""

_MAX_HEADER_BYTES = 2**16
"""Arrow writes headers of less than 100 bytes, and of a few kilobytes with statistics."""
_MAX_DEPTH = 8
_UNCOMPRESSED_BYTES, _COMPRESSED_BYTES, _NUM_VALUES = 2, 3, 1
_DICTIONARY = 7
_KINDS = (5, _DICTIONARY, 8)
"""Fields of a page's header, one of which describes the page: data, dictionary, data of version 2."""
_ENCODING_FIELDS = {5: 2, 8: 4}
"""The field that holds the encoding, by the kind of the page."""
_DELTA_BYTE_ARRAY = 7
"""This encoding stores how much of the text before is repeated: the size of the page says nothing about the texts."""


@dataclass(frozen=True)
class ColumnSize:
    """What one column of a row group decodes to, before texts are repeated."""

    num_bytes: int
    dictionary_bytes: int
    """The part of `num_bytes` that is a dictionary: its texts are stored once, however many values repeat them."""
    num_values: int
    """Texts, numbers, nulls and empty lists. A thousand million of them can be a few bytes in the file."""


def column_sizes(file: BinaryIO, places: Iterable[tuple[int, int]]) -> list[ColumnSize]:
    """Add up the pages of columns, each of which begins at a position and has a number of bytes. Raises ValueError for
    bytes that are no pages, for too many pages, and for an encoding that hides the size of its texts."""
    sizes, num_pages = [], 0
    for start, num_bytes in places:
        at, end = start, start + num_bytes
        uncompressed = dictionary = values = 0
        while at < end:
            num_pages += 1
            if num_pages > MAX_PAGES:
                raise ValueError(f"it has more than {MAX_PAGES} pages")
            file.seek(at)
            header = _Reader(file.read(min(_MAX_HEADER_BYTES, end - at)))
            fields = header.struct(0)
            num_uncompressed, num_compressed, num_values = _page_sizes(fields)
            uncompressed, values = uncompressed + num_uncompressed, values + num_values
            dictionary += num_uncompressed if _DICTIONARY in fields else 0
            at += header.at + num_compressed
        sizes.append(ColumnSize(uncompressed, dictionary, values))
    return sizes


def _page_sizes(fields: dict[int, Any]) -> tuple[int, int, int]:
    page: Any = next((fields[kind] for kind in _KINDS if kind in fields), {})
    for kind, number in _ENCODING_FIELDS.items():
        if isinstance(page, dict) and kind in fields and page.get(number) == _DELTA_BYTE_ARRAY:
            raise ValueError("it uses the encoding DELTA_BYTE_ARRAY; choose PLAIN or a dictionary")
    num_values = page.get(_NUM_VALUES) if isinstance(page, dict) else None
    sizes = (fields.get(_UNCOMPRESSED_BYTES), fields.get(_COMPRESSED_BYTES), num_values if page else 0)
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise ValueError("the header of a page is damaged")
    return cast(tuple[int, int, int], sizes)


class _Reader:
    """Reads a Thrift structure from bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def struct(self, depth: int) -> dict[int, Any]:
        """The integers and structures of a structure, by the number of their field."""
        if depth > _MAX_DEPTH:
            raise ValueError("the header of a page is nested too deep")
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            number = number + (head >> 4) if head >> 4 else self._integer()
            fields[number] = self._value(head & 0xF, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # true and false have no bytes of their own
            return None
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 7:
            return self._skip(8)
        if kind == 8:
            return self._skip(self._varint())
        if kind in (9, 10):
            return self._list(depth)
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError("the header of a page has a field of an unknown type")

    def _list(self, depth: int) -> None:
        head = self._byte()
        num_items, kind = (self._varint() if head >> 4 == 15 else head >> 4), head & 0xF
        if num_items > len(self.data):
            raise ValueError("the header of a page has a list that is too long")
        for _ in range(num_items):
            # In a list, true and false are a byte each.
            self._value(3 if kind in (1, 2) else kind, depth + 1)

    def _integer(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)

    def _varint(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
        raise ValueError("the header of a page has a number that is too long")

    def _byte(self) -> int:
        if self.at >= len(self.data):
            raise ValueError("the header of a page is cut off")
        self.at += 1
        return self.data[self.at - 1]

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > len(self.data) - self.at:
            raise ValueError("the header of a page is cut off")
        self.at += num_bytes
