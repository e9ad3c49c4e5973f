"""Client of a retrieval service that takes Search-R1's requests.

The request is `{"queries": [...], "topk": 3, "return_scores": true}`. The answer has one list per query:
`{"result": [[{"document": {"contents": "..."}, "score": 1.0}, ...]]}`. Without scores, the entries are the documents.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import httpx

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class RetrievalService:
    """Retries connection errors, 429 and 5xx. `timeout_s` is the deadline of one attempt; the caller limits all."""

    def __init__(
        self, url: str, timeout_s: float, max_connections: int, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._url = url
        self._http = httpx.AsyncClient(
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=max_connections),
            transport=transport,
            trust_env=False,
        )

    async def open(self) -> None:
        """The service may start later than this server, so it is not called here."""

    async def close(self) -> None:
        await self._http.aclose()

    async def find(self, queries: Sequence[str], top_k: int) -> list[list[str]]:
        body = {"queries": list(queries), "topk": top_k, "return_scores": True}
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                response = await self._http.post(self._url, json=body)
                if response.status_code != httpx.codes.TOO_MANY_REQUESTS and not response.is_server_error:
                    return _read(response, len(queries), top_k)
            except httpx.TransportError:
                pass  # the service is starting, or the network is down for a moment
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _read(response: httpx.Response, num_queries: int, top_k: int) -> list[list[str]]:
    if not response.is_success:
        raise RuntimeError(f"the retrieval service answered {response.status_code}: {response.text[:200]!r}")
    try:
        results = response.json()["result"]
        found = [[_contents(entry) for entry in entries[:top_k]] for entries in results]
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"the retrieval service answered {response.text[:200]!r}, which has no passages") from error
    if len(found) != num_queries:
        raise RuntimeError(f"the retrieval service answered {len(found)} of {num_queries} queries")
    return found


def _contents(entry: dict[str, Any]) -> str:
    document = entry.get("document", entry)
    return str(document["contents"])
