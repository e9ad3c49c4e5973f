"""Reads the rows of a Parquet file. A separate process reads and decodes one of unknown origin.

A small file can decode to many gigabytes, because a text is stored once however often it is repeated, and its footer
can lie about it. So `python -m penstock.feed.parquet_rows` reads it with bounded memory and time, adds up what its rows
hold, and writes them as an Arrow stream, whose schema also names the file's columns. What kills it, such as a damaged
page in Arrow's C++ code, harms nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidInput, Unavailable, one_line

if TYPE_CHECKING:  # the process that decodes does without pydantic
    from penstock.config.service import GatewayLimits

Check = Callable[[Sequence[str]], None]
"""Raises InvalidInput if a file with these columns cannot be used."""

_BATCH_ROWS = 1024
_VALUE_BYTES = 64
"""What a text, a number or a null costs besides its content, as a Python object."""
_COPIES = 2
"""Arrow holds the values of a batch as pages and as texts."""
_START_BYTES = 2**26
"""Memory of the process for what is not a value."""
_PROCESSOR_S, _DEADLINE_S = 30, 50.0
_NAMED_COLUMNS, _SAID_BYTES = 50, 500
"""Largest numbers of other columns, and of bytes of a reason, in messages."""
_REFUSED, _UNREADABLE = 3, 4
"""Exit statuses of the process. Its standard error says why."""
_decoder = threading.Lock()
"""One file at a time, so that files which come together take no more memory than one."""


def all_rows(path: Path, columns: Sequence[str], check: Check) -> Iterator[dict[str, Any]]:
    """The rows of a trusted file, with those of these columns that it has."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        check(names)
        wanted = [name for name in columns if name in names]
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=wanted):
            yield from batch.to_pylist()


def limited_rows(path: Path, columns: Sequence[str], check: Check, limits: GatewayLimits) -> Iterator[dict[str, Any]]:
    """The same for a stranger's file. Raises InvalidInput beyond the limits, before the first row."""
    import pyarrow

    with tempfile.TemporaryFile(dir=path.parent) as rows:
        _decode(path, columns, limits, rows)
        rows.seek(0)
        with pyarrow.ipc.open_stream(rows) as batches:
            check(json.loads(batches.schema.metadata[b"columns"]))
            for batch in batches:
                yield from batch.to_pylist()


def _decode(path: Path, columns: Sequence[str], limits: GatewayLimits, rows: Any) -> None:
    """Have a process write the rows to a file. Raises InvalidInput or ValueError if it writes fewer than all."""
    arguments = [str(limits.max_dataset_prompts), str(limits.max_dataset_bytes), str(path), *columns]
    # Other pools and OpenBLAS reserve addresses ahead.
    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "OPENBLAS_NUM_THREADS": "1"}
    if not _decoder.acquire(timeout=_DEADLINE_S):
        raise Unavailable("other datasets are being decoded; try again")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", __name__, *arguments], check=False, timeout=_DEADLINE_S, env=environment,
            stdin=subprocess.DEVNULL, stdout=rows, stderr=subprocess.PIPE,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise InvalidInput(str(path), f"takes more than {_DEADLINE_S:.0f} s to decode; split it") from error
    except OSError as error:
        raise Unavailable(f"no process can be started to decode a dataset ({error.strerror}); try again") from error
    finally:
        _decoder.release()
    why = ended.stderr[:_SAID_BYTES].decode(errors="replace")
    if ended.returncode == _UNREADABLE:
        raise ValueError(why)
    if ended.returncode:
        died = f"is damaged, or takes too much memory or time to decode ({ended.returncode}); split it"
        raise InvalidInput(str(path), why if ended.returncode == _REFUSED else died)


# ── the process that decodes ──


def main(max_rows: int, max_bytes: int, path: str, *columns: str) -> int:
    """Write the rows to standard output, as an Arrow stream. Returns the exit status."""
    import pyarrow

    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit, and another system may have a lower one
        started = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        memory = started + _START_BYTES + _COPIES * max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_S, _PROCESSOR_S))
    status = _REFUSED
    try:
        why = _send(max_rows, max_bytes, path, columns)
    except MemoryError:
        why = "takes too much memory to decode; split it, or write smaller row groups"
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        status, why = _UNREADABLE, one_line(error)
    sys.stderr.write(why)
    return status if why else 0


def _send(max_rows: int, max_bytes: int, path: str, columns: Sequence[str]) -> str:
    """Write the rows with those of these columns that the file has. Returns why it is refused, or nothing."""
    import pyarrow
    from pyarrow import parquet

    num_bytes = 0
    with parquet.ParquetFile(path) as file:
        if file.metadata.num_rows > max_rows:
            return f"has more than {max_rows} prompts; split it"
        names = file.schema_arrow.names
        wanted = [name for name in columns if name in names]
        others = [name for name in names if name not in wanted]
        metadata = {"columns": json.dumps(wanted + others[:_NAMED_COLUMNS])}
        schema = pyarrow.schema([file.schema_arrow.field(name) for name in wanted], metadata=metadata)
        with pyarrow.ipc.new_stream(sys.stdout.buffer, schema) as stream:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=wanted, use_threads=False):
                num_bytes += _num_bytes(batch.to_struct_array())
                if num_bytes > max_bytes:
                    return f"decodes to more than {max_bytes} bytes; split it"
                stream.write_batch(batch.select(wanted))
    return ""


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
    if types.is_map(kind):
        inner = [array.keys, array.items]
    else:
        inner = array.flatten() if types.is_struct(kind) else [array.flatten()]
    return _VALUE_BYTES * len(array) + sum(map(_num_bytes, inner))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
