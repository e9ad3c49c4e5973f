"""Reads the rows of a Parquet file. A file of unknown origin is read within limits.

A small file can decode to many gigabytes, because a column may have a dictionary: a text is stored once, and each value
is only the number of its text. Within limits, Arrow therefore keeps the dictionary apart from the values, and texts are
copied a few rows at a time, after their sizes were added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidInput

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
    """Add up the pages of columns, each at a position with a number of bytes, by the headers of the pages. Raises
    ValueError for damaged bytes, for too many pages, and for an encoding that hides the size of its texts.

    The footer has the same numbers, but no reader compares them: a file of unknown origin can say there that it is
    small. The headers, Thrift structures in the compact protocol, are what the reader allocates memory for."""
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
        if kind in (1, 2):  # true and false take no bytes
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
        self._skip(1)
        return self.data[self.at - 1]

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > len(self.data) - self.at:
            raise ValueError("the header of a page is cut off")
        self.at += num_bytes


_BATCH_ROWS = 1024
_ROW_BYTES = 16 * 2**20
"""Largest size of the texts of a row, and of the rows that are decoded at once."""
_VALUE_BYTES = 64
"""What a text, a number or a null costs besides its content, as a Python object."""
_DICTIONARY_COPIES = 4
"""Arrow holds a dictionary as a page, as texts, in a hash table and in the batch."""
_TEXT_KINDS = ("NONE", "STRING", "ENUM", "JSON", "BSON")
"""Logical types of byte arrays that Arrow can keep as a dictionary."""


@dataclass(frozen=True)
class ReadLimits:
    """What a file that a stranger sent may hold."""

    max_rows: int
    max_bytes: int
    """Bytes of the decoded columns of a Parquet file, with 64 for each value."""


def column_names(path: Path) -> list[str]:
    from pyarrow import parquet

    return list(parquet.read_schema(path).names)


def all_rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a trusted file, with these columns."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
            yield from batch.to_pylist()


def limited_rows(path: Path, columns: Sequence[str], limits: ReadLimits) -> Iterator[dict[str, Any]]:
    """The rows with these columns. Raises InvalidInput beyond the limits, before memory is taken for them."""
    from pyarrow import parquet

    metadata = parquet.read_metadata(path)
    dictionaries = _checked_dictionaries(path, metadata, columns, limits)
    number, num_bytes = 0, 0
    with parquet.ParquetFile(path, metadata=metadata, read_dictionary=dictionaries) as file:
        for group in range(metadata.num_row_groups):  # each has its own dictionaries
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=columns):
                sizes = sum(map(_text_sizes, batch.columns), start=np.zeros(batch.num_rows, np.int64))
                num_bytes += int(sizes.sum())
                if num_bytes > limits.max_bytes:
                    raise _too_large(path, limits)
                if sizes.size and sizes.max() > _ROW_BYTES:
                    row = number + int(sizes.argmax())
                    raise InvalidInput(f"{path} row {row}", f"has texts of more than {_ROW_BYTES} bytes; shorten them")
                for start, stop in _pieces(sizes):
                    yield from batch.slice(start, stop - start).to_pylist()
                number += batch.num_rows


def _checked_dictionaries(path: Path, metadata: Any, columns: Sequence[str], limits: ReadLimits) -> list[int]:
    """Check what the pages hold before any is decoded. Returns the columns that have dictionaries of texts."""
    if metadata.num_rows > limits.max_rows:
        raise InvalidInput(str(path), f"has more than {limits.max_rows} prompts; split it")
    chunks = _chunks(metadata, columns)
    with path.open("rb") as file:
        sizes = column_sizes(file, ((_start(chunk), chunk.total_compressed_size) for _, _, chunk in chunks))
    total, numbers = 0, set()
    dictionary_bytes: Counter[int] = Counter()
    for (group, number, chunk), size in zip(chunks, sizes, strict=True):
        column = metadata.schema.column(number)
        is_fixed = chunk.physical_type == "FIXED_LEN_BYTE_ARRAY"
        total += size.num_bytes + size.num_values * (_VALUE_BYTES + (column.length if is_fixed else 0))
        dictionary_bytes[group] += _DICTIONARY_COPIES * size.dictionary_bytes
        if chunk.physical_type == "BYTE_ARRAY" and size.dictionary_bytes:
            if column.logical_type.type not in _TEXT_KINDS:
                kind = column.logical_type.type
                raise InvalidInput(str(path), f"has a dictionary of {kind} in {column.path}; write texts or numbers")
            numbers.add(number)
    if max(total, *dictionary_bytes.values(), 0) > limits.max_bytes:
        raise _too_large(path, limits)
    return sorted(numbers)


def _chunks(metadata: Any, columns: Sequence[str]) -> list[tuple[int, int, Any]]:
    """The parts of a Parquet file that hold these columns, each with its row group and the number of its column."""
    groups = [(group, metadata.row_group(group)) for group in range(metadata.num_row_groups)]
    chunks = [(group, number, row.column(number)) for group, row in groups for number in range(row.num_columns)]
    return [chunk for chunk in chunks if chunk[2].path_in_schema.partition(".")[0] in columns]


def _start(chunk: Any) -> int:
    """Where the first page of a column is."""
    first = chunk.dictionary_page_offset if chunk.has_dictionary_page else None
    return int(min(first, chunk.data_page_offset) if first else chunk.data_page_offset)


def _text_sizes(array: Any) -> NDArray[np.int64]:
    """Bytes of the texts in each value of an Arrow array, as if every repetition were a separate text."""
    import pyarrow
    from pyarrow import compute, types

    kind = array.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _text_sizes(array.storage)
    if types.is_dictionary(kind):
        lengths = compute.binary_length(array.dictionary)
        return _numbers(compute.fill_null(compute.take(lengths, array.indices), 0))
    if types.is_string_view(kind) or types.is_binary_view(kind):
        array = array.cast(pyarrow.large_string() if types.is_string_view(kind) else pyarrow.large_binary())
    text_kinds = (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
    if any(is_kind(array.type) for is_kind in text_kinds):
        return _numbers(compute.fill_null(compute.binary_length(array), 0))
    if types.is_struct(kind):
        return sum(map(_text_sizes, array.flatten()), start=np.zeros(len(array), np.int64))
    if types.is_fixed_size_list(kind):
        array = array.cast(pyarrow.list_(kind.value_type))
    if types.is_list(array.type) or types.is_large_list(kind) or types.is_map(kind):
        ends = np.concatenate(([0], np.cumsum(_text_sizes(array.values))))
        offsets = _numbers(array.offsets)
        sizes: NDArray[np.int64] = ends[offsets[1:]] - ends[offsets[:-1]]
        return sizes
    is_number = types.is_primitive(kind) or types.is_null(kind) or types.is_decimal(kind)
    if not is_number and not types.is_fixed_size_binary(kind):
        raise ValueError(f"it has values of the type {kind}")
    return np.zeros(len(array), np.int64)


def _numbers(array: Any) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = array.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def _pieces(sizes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of rows, the texts of each of which add up to at most `_ROW_BYTES`."""
    start, total = 0, 0
    for number, size in enumerate(sizes.tolist()):
        if total + size > _ROW_BYTES:
            yield start, number
            start, total = number, 0
        total += size
    yield start, len(sizes)


def _too_large(path: Path, limits: ReadLimits) -> InvalidInput:
    return InvalidInput(str(path), f"decodes to more than {limits.max_bytes} bytes; split it")
