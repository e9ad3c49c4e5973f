"""Reads datasets of the Hub, or a local copy of them, and writes Parquet files in verl's schema.

Every prepare.py has the same options:

    --out FOLDER     where train.parquet and the validation files go
    --from FOLDER    a local copy: FOLDER/<dataset>/<files as on the Hub>; nothing is downloaded
    --limit N        only the first N rows of each file
"""

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


class Source:
    """Where datasets come from: the Hub, or a folder."""

    def __init__(self, local: Path | None, limit: int | None) -> None:
        self.local = local
        self.limit = limit

    def rows(self, dataset: str, pattern: str) -> Iterator[Row]:
        """The rows of the files of a dataset that match a pattern such as `main/train-*.parquet`."""
        folder = self._folder(dataset, pattern)
        files = sorted(folder.glob(pattern))
        if not files:
            raise SystemExit(f"{folder} has no {pattern}; give a copy of https://huggingface.co/datasets/{dataset}")
        return itertools.islice(itertools.chain.from_iterable(map(read_rows, files)), self.limit)

    def _folder(self, dataset: str, pattern: str) -> Path:
        if self.local is not None:
            name = dataset.rpartition("/")[2]
            found = (self.local / part for part in (dataset, name) if (self.local / part).is_dir())
            return next(found, self.local)
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(dataset, repo_type="dataset", allow_patterns=[pattern]))


def read_rows(file: Path) -> Iterator[Row]:
    """The rows of a Parquet or JSONL file."""
    if file.suffix == ".parquet":
        for batch in pq.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()
    else:
        with file.open() as lines:
            yield from map(json.loads, lines)


def row(
    prompt: str | list[dict[str, str]],
    data_source: str,
    ground_truth: Any,
    *,
    index: int,
    agent: str = "",
    **extra: Any,
) -> Row:
    """A row in verl's schema. In one file all ground truths must have the same type."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    made: Row = {
        "data_source": data_source,
        "prompt": messages,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": index, **extra},
    }
    return made | ({"agent_name": agent} if agent else {})


def write_rows(rows: Iterable[Row], file: Path) -> None:
    """Write a Parquet file, and say how many rows it has."""
    listed = list(rows)
    if not listed:
        raise SystemExit(f"{file} would have no rows; check the source")
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(listed), file)
    print(f"{file}: {len(listed)} rows")


def unique(rows: Iterable[Row], key: Any) -> Iterator[Row]:
    """The first row of each key. Some datasets repeat their rows."""
    seen = set()
    for entry in rows:
        if (value := key(entry)) not in seen:
            seen.add(value)
            yield entry


def parse(description: str | None, default_out: str, argv: Sequence[str] | None) -> tuple[Source, Path]:
    """The options of a prepare.py: where rows come from, and the folder to write to."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path(default_out), help="folder to write to (default: %(default)s)")
    parser.add_argument("--from", dest="local", type=Path, help="folder with a local copy of the datasets")
    parser.add_argument("--limit", type=int, help="only the first rows of each file")
    args = parser.parse_args(argv)
    if args.local is not None and not args.local.is_dir():
        parser.error(f"--from {args.local} is not a folder")
    return Source(args.local, args.limit), args.out
