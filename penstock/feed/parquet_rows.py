"""Reads the rows of a Parquet file. A file of unknown origin is decoded by a process of its own.

A small file can decode to many gigabytes, because a text is stored once however often it is repeated, and its footer
can lie about it. So `python -m penstock.feed.parquet_rows` decodes it with a bounded memory and processor time, adds up
what its rows hold, and sends them in the form of Arrow streams. What kills it, such as a damaged page in Arrow's C++
code, harms nothing else.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import InvalidInput, one_line

_BATCH_ROWS = 1024
_VALUE_BYTES = 64
"""What a text, a number or a null costs besides its content, as a Python object."""
_COPIES = 4
"""Arrow holds values as a page, in a dictionary, in the batch, and in the message that is sent."""
_START_BYTES = 2**30
"""Address space of Python and Arrow before they read anything."""
_PROCESSOR_S = 60
_END_S = 10.0
_REFUSED, _UNREADABLE = 3, 4
"""Exit statuses of the process. Its standard error says why."""


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
    """The rows with these columns. Raises InvalidInput beyond the limits. This process holds one batch at a time."""
    arguments = [str(limits.max_rows), str(limits.max_bytes), str(path), *columns]
    with subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"},  # the other pools reserve addresses ahead
    ) as process:
        try:
            for batch in _received(process.stdout):
                yield from batch.to_pylist()
            status = process.wait(_END_S)
            assert process.stderr is not None
            why = process.stderr.read().decode(errors="replace")
        finally:
            process.kill()
    if status == _UNREADABLE:
        raise ValueError(why)
    if status == _REFUSED:
        raise InvalidInput(str(path), why)
    if status:
        raise InvalidInput(str(path), f"is damaged, or takes too much memory or time to decode ({status}); split it")


def _received(stream: Any) -> Iterator[Any]:
    """The record batches of a stream, up to its end or to where the sender died."""
    import pyarrow

    with contextlib.suppress(pyarrow.ArrowException), pyarrow.ipc.open_stream(stream) as batches:
        yield from batches


# ── the process that decodes ──


def main(max_rows: int, max_bytes: int, path: str, *columns: str) -> int:
    """Write the rows to standard output, as an Arrow stream. Returns the exit status."""
    import pyarrow
    from pyarrow import parquet

    memory = _START_BYTES + _COPIES * max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_S, _PROCESSOR_S))
    too_large, num_bytes = f"decodes to more than {max_bytes} bytes; split it", 0
    try:
        with parquet.ParquetFile(path) as file:
            if file.metadata.num_rows > max_rows:
                return _say(_REFUSED, f"has more than {max_rows} prompts; split it")
            batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=columns, use_threads=False)
            schema = pyarrow.schema([file.schema_arrow.field(name) for name in columns])
            with pyarrow.ipc.new_stream(sys.stdout.buffer, schema) as stream:
                for batch in batches:
                    num_bytes += _num_bytes(batch.to_struct_array())
                    if num_bytes > max_bytes:
                        return _say(_REFUSED, too_large)
                    stream.write_batch(batch.select(columns))
    except MemoryError:
        return _say(_REFUSED, too_large)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        return _say(_UNREADABLE, one_line(error))
    return 0


def _say(status: int, why: str) -> int:
    sys.stderr.write(why)
    return status


def _num_bytes(array: Any) -> int:
    """What the values of an Arrow array take as Python objects, each repetition of a text counted."""
    from pyarrow import types

    kind = array.type
    if hasattr(array, "storage"):
        return _num_bytes(array.storage)
    if types.is_dictionary(kind):
        array = array.dictionary_decode()
    if not types.is_nested(kind):
        return int(array.nbytes) + _VALUE_BYTES * len(array)
    inner = array.flatten() if types.is_struct(kind) else [array.keys, array.items] if types.is_map(kind) else None
    return _VALUE_BYTES * len(array) + sum(map(_num_bytes, [array.flatten()] if inner is None else inner))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
