"""A local index of passages, ranked by BM25: what the search tool of a running agent reads. `penstock search-index`
writes one to disk.

A file of passages is JSONL or Parquet. A passage has `contents`, whose first line is its title, as in Search-R1's
corpora; or `text`, and perhaps `title`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

_LANGUAGE = "en"


@dataclass(eq=False)
class SearchIndex:
    """`open` loads or builds the index. A folder is mapped into memory and read as needed; a file is kept in memory."""

    _path: Path
    _where: str
    _ranking: Any = None
    _contents: Sequence[str | Mapping[str, str]] = ()

    async def open(self) -> None:
        try:
            await asyncio.to_thread(self._load)
        except ConfigError as error:
            raise ConfigError(f"{self._where}: {error}") from error

    async def close(self) -> None:
        self._ranking, self._contents = None, ()

    async def find(self, queries: Sequence[str], top_k: int) -> list[list[str]]:
        return await asyncio.to_thread(self._find, queries, top_k)

    def _load(self) -> None:
        if self._path.is_dir():
            try:
                self._ranking = _bm25s().BM25.load(self._path, mmap=True, load_corpus=True, show_progress=False)
            except (OSError, ValueError, KeyError) as error:
                raise ConfigError(
                    f"{self._path} is not a search index ({error}); write one with penstock search-index"
                ) from error
            self._contents = self._ranking.corpus
        elif self._path.is_file():
            contents = list(read_passages(self._path))
            self._ranking = build_index(contents)
            self._contents = contents
        else:
            raise ConfigError(f"{self._path} does not exist; check the path")

    def _find(self, queries: Sequence[str], top_k: int) -> list[list[str]]:
        tokens = _bm25s().tokenize(list(queries), stopwords=_LANGUAGE, return_ids=False, show_progress=False)
        found: list[list[str]] = []
        for words in tokens:
            known = [word for word in words if word in self._ranking.vocab_dict]
            if not known:
                found.append([])
                continue
            everything = range(len(self._contents))
            num = min(top_k, len(everything))
            rows, scores = self._ranking.retrieve([known], corpus=everything, k=num, show_progress=False)
            passages = [self._contents[int(row)] for row, score in zip(rows[0], scores[0], strict=True) if score > 0]
            found.append([passage if isinstance(passage, str) else passage["text"] for passage in passages])
        return found


def read_passages(path: Path) -> Iterator[str]:
    """The contents of each passage of a file. Raises ConfigError with the line of a passage that has none."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        rows: Iterator[Any] = (row for batch in pq.ParquetFile(path).iter_batches() for row in batch.to_pylist())
    else:
        rows = _json_lines(path)
    for number, row in enumerate(rows, start=1):
        contents = row.get("contents") if isinstance(row, dict) else None
        if contents is None and isinstance(row, dict) and isinstance(row.get("text"), str):
            contents = "\n".join(part for part in (row.get("title"), row["text"]) if part)
        if not isinstance(contents, str):
            raise ConfigError(f"{path}: passage {number} has neither the text `contents` nor `text`")
        yield contents


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{path}: line {number} is not JSON: {error}") from error


def build_index(contents: Sequence[str]) -> Any:
    """The ranking of these passages. Raises ConfigError if there is none, or if bm25s is not installed."""
    bm25s = _bm25s()
    if not contents:
        raise ConfigError("there is no passage to index")
    ranking = bm25s.BM25()
    ranking.index(bm25s.tokenize(contents, stopwords=_LANGUAGE, show_progress=False), show_progress=False)
    return ranking


def _bm25s() -> Any:
    try:
        import bm25s
    except ModuleNotFoundError as error:
        raise ConfigError("the search tool needs bm25s; install it with: pip install 'penstock[agents]'") from error
    return bm25s
