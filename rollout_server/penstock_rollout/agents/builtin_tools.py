"""The built-in tools, which `rollout.agents.tools` offers by name: `python` and `search`.

A search asks a retrieval service, or a local index of passages, ranked by BM25; `penstock search-index` writes one. A
file of passages is JSONL or Parquet. A passage has `contents`, whose first line is its title, as in Search-R1's
corpora; or `text`, and perhaps `title`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from penstock.config.rollout import PythonTool, SearchTool
from penstock.errors import ConfigError
from penstock_rollout.agents.tools import Tool, ToolAnswer
from penstock_rollout.rewards.pool import RewardFailed, RewardPool
from penstock_rollout.rewards.scorer import JsonService

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
            self._contents = contents = list(read_passages(self._path))
            self._ranking = build_index(contents)
        else:
            raise ConfigError(f"{self._path} does not exist; check the path")

    def _find(self, queries: Sequence[str], top_k: int) -> list[list[str]]:
        tokens = _bm25s().tokenize(list(queries), stopwords=_LANGUAGE, return_ids=False, show_progress=False)
        return [self._best([word for word in words if word in self._ranking.vocab_dict], top_k) for words in tokens]

    def _best(self, words: Sequence[str], top_k: int) -> list[str]:
        if not words:
            return []
        everything = range(len(self._contents))
        num = min(top_k, len(everything))
        rows, scores = self._ranking.retrieve([words], corpus=everything, k=num, show_progress=False)
        passages = [self._contents[int(row)] for row, score in zip(rows[0], scores[0], strict=True) if score > 0]
        return [passage if isinstance(passage, str) else passage["text"] for passage in passages]


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


PYTHON_DESCRIPTION = (
    "Runs a Python program and returns what it prints. Nothing is kept between calls, and there is no network."
)
SEARCH_DESCRIPTION = "Searches a collection of texts and returns the passages that match a query best."
_SPARE_S = 30.0
"""How long the sandbox may take, beyond the program's own limit, to start a program and to end it."""


def _schema(name: str, description: str, parameters: Mapping[str, str]) -> dict[str, Any]:
    """The schema of a function whose parameters are all texts. `parameters` maps their names to descriptions."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": text} for key, text in parameters.items()},
                "required": list(parameters),
            },
        },
    }


class ProgramTool(Tool):
    """Runs programs in its own processes, each of which runs one program at a time."""

    def __init__(self, name: str, settings: PythonTool) -> None:
        schema = _schema(name, settings.description or PYTHON_DESCRIPTION, {"code": "The Python program."})
        super().__init__(settings.model_dump(mode="json"), schema)
        self.timeout_s = settings.max_wait_s + settings.timeout_s + _SPARE_S
        self._run_s = settings.timeout_s + _SPARE_S
        self._settings = json.dumps(self.config, sort_keys=True)
        self._pool = RewardPool(settings.num_processes)

    async def open(self) -> None:
        try:
            await self._pool.prepare(self._settings)
        except RewardFailed as error:
            message = str(error).removeprefix("ConfigError: ")
            raise ConfigError(f"rollout.agents.tools.{self.name}: {message}") from error

    async def close(self) -> None:
        await self._pool.close()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolAnswer:
        code = parameters.get("code")
        if not isinstance(code, str) or not code.strip():
            raise ValueError('give the program as the text "code"')
        try:
            result = await self._pool.compute(self._settings, {"code": code}, self._run_s, "result")
        except RewardFailed as error:
            raise RuntimeError(f"the program could not be run: {error}") from error
        return result["text"], 0.0, {"calls": 1.0, "failed": 0.0 if result["succeeded"] else 1.0}


class RetrievalService(JsonService):
    """Client of a retrieval service that takes Search-R1's requests.

    The request is `{"queries": [...], "topk": 3, "return_scores": true}`. The answer has one list per query:
    `{"result": [[{"document": {"contents": "..."}, "score": 1.0}, ...]]}`. Without scores, the entries are the
    documents. Connection errors, 429 and 5xx are retried."""

    async def open(self) -> None:
        """The service may start later than this server, so it is not called here."""

    async def find(self, queries: Sequence[str], top_k: int) -> list[list[str]]:
        """The contents of the best passages of each query, best first."""
        body = {"queries": list(queries), "topk": top_k, "return_scores": True}
        return _read(await self.post(body), len(queries), top_k)


def _read(response: httpx.Response, num_queries: int, top_k: int) -> list[list[str]]:
    if not response.is_success:
        raise RuntimeError(f"the retrieval service answered {response.status_code}: {response.text[:200]!r}")
    try:
        results = response.json()["result"]
        found = [[str(entry.get("document", entry)["contents"]) for entry in entries[:top_k]] for entries in results]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(f"the retrieval service answered {response.text[:200]!r}, which has no passages") from error
    if len(found) != num_queries:
        raise RuntimeError(f"the retrieval service answered {len(found)} of {num_queries} queries")
    return found


class RetrievalTool(Tool):
    """Takes `query`, or several at once as `query_list`, which is the argument of verl's search tool."""

    def __init__(self, name: str, settings: SearchTool) -> None:
        schema = _schema(name, settings.description or SEARCH_DESCRIPTION, {"query": "What to search for."})
        super().__init__(settings.model_dump(mode="json"), schema)
        where = f"rollout.agents.tools.{name}"
        self.timeout_s = settings.max_wait_s + settings.timeout_s
        self._search_s = settings.timeout_s
        self._top_k = settings.top_k
        self._free = asyncio.Semaphore(settings.max_concurrent)
        self._retriever = (
            SearchIndex(settings.index, f"{where}.index")
            if settings.index
            else RetrievalService(str(settings.url), settings.timeout_s, settings.max_concurrent)
        )

    async def open(self) -> None:
        await self._retriever.open()

    async def close(self) -> None:
        await self._retriever.close()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolAnswer:
        queries = _queries(parameters)
        async with self._free:
            try:
                async with asyncio.timeout(self._search_s):
                    found = await self._retriever.find(queries, self._top_k)
            except TimeoutError as error:
                raise RuntimeError(f"the search took longer than {self._search_s:g} s") from error
        text = "\n---\n".join(_listed(passages) for passages in found)
        return text, 0.0, {"calls": 1.0, "passages": float(sum(map(len, found)))}


def _queries(parameters: Mapping[str, Any]) -> list[str]:
    given = parameters.get("query", parameters.get("query_list"))
    queries = [given] if isinstance(given, str) else given
    if not isinstance(queries, list) or not queries or not all(isinstance(one, str) and one.strip() for one in queries):
        raise ValueError('give the text "query"')
    return queries


def _listed(passages: Sequence[str]) -> str:
    """Passages as Search-R1 shows them: the first line of the contents is the title."""
    if not passages:
        return "No passage was found."
    lines = []
    for number, contents in enumerate(passages, start=1):
        title, _, text = contents.partition("\n")
        lines.append(f"Doc {number} (Title: {title}) {text}" if text else f"Doc {number} {title}")
    return "\n".join(lines)
