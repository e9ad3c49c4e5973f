"""The built-in `search` tool: passages of a local index, or of a retrieval service."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.config.tools import SearchTool as SearchSettings
from penstock_rollout.agents.builtin.retrieval_service import RetrievalService
from penstock_rollout.agents.builtin.schemas import built_in_schema
from penstock_rollout.agents.builtin.search_index import SearchIndex
from penstock_rollout.agents.tools import Tool, ToolAnswer

DESCRIPTION = "Searches a collection of texts and returns the passages that match a query best."


class Retriever(Protocol):
    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def find(self, queries: Sequence[str], top_k: int) -> list[list[str]]:
        """The contents of the best passages of each query, best first."""
        ...


class SearchTool(Tool):
    """Takes `query`, or several at once as `query_list`, which is the argument of verl's search tool."""

    def __init__(self, name: str, settings: SearchSettings) -> None:
        schema = built_in_schema(name, settings.description or DESCRIPTION, {"query": "What to search for."})
        super().__init__(settings.model_dump(mode="json"), schema)
        where = f"rollout.agents.tools.{name}"
        self.timeout_s = settings.max_wait_s + settings.timeout_s
        self._search_s = settings.timeout_s
        self._top_k = settings.top_k
        self._free = asyncio.Semaphore(settings.max_concurrent)
        self._retriever: Retriever = (
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
