"""No address and no path that a client, a dataset or a model has written is ever opened.

A real server listens on loopback, where a gateway could reach it, and counts who connects.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.gateways import PROMPT, RUN, Gateway
from support.scripted_engines import TalkingEngine

Talking = tuple[Gateway, dict[str, TalkingEngine]]


class Bait:
    """A web server. `num_connections` must stay 0."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.url = ""

    async def answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}")
        writer.close()


@pytest.fixture
async def bait() -> AsyncIterator[Bait]:
    made = Bait()
    async with await asyncio.start_server(made.answer, "127.0.0.1", 0) as server:
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/latest/meta-data"
        yield made


def addresses(bait: Bait) -> list[str]:
    return [bait.url, bait.url.replace("http:", ""), "file:///etc/hostname", "http://169.254.169.254/latest/meta-data"]


@pytest.mark.parametrize("number", range(4), ids=["http", "no scheme", "file", "link-local"])
async def test_an_address_in_a_request_is_text_or_refused(talking: Talking, bait: Bait, number: int) -> None:
    gateway, _ = talking
    url = addresses(bait)[number]
    user: dict[str, Any] = {"role": "user", "content": "abc"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": url}}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": url}}}
    image = {"type": "image_url", "image_url": {"url": url}}
    foreign = {"type": "image", "source": {"type": "url", "url": url}}
    refused = [
        ("/v1/chat/completions", {"messages": [user | {"content": [image]}]}),
        ("/v1/chat/completions", {"messages": [user | {"images": [url]}]}),
        ("/v1/chat/completions", {"messages": [user], "audio": {"url": url}}),
        ("/v1/chat/completions", {"messages": [user], "web_search_options": {"url": url}}),
        ("/v1/responses", {"input": [user | {"content": [{"type": "input_image", "image_url": url}]}]}),
        ("/v1/responses", {"input": "abc", "tools": [{"type": "mcp", "server_label": "s", "server_url": url}]}),
        ("/v1/messages", {"max_tokens": 4, "messages": [user | {"content": [foreign]}]}),
        ("/v1/messages", {"max_tokens": 4, "messages": [user], "mcp_servers": [{"type": "url", "url": url}]}),
    ]
    for path, body in refused:
        answer = await gateway.rest.post(path, json={"model": "test"} | body)
        assert answer.status_code == 400, (path, body, answer.text)
    texts = [
        ("/v1/chat/completions", {"model": "test", "messages": [user | {"content": url}], "tools": [tool]}),
        ("/v1/chat/completions", {"model": "test", "messages": [user], "response_format": schema}),
        (f"{RUN}/prompts", {"prompts": [PROMPT | {"messages": [user | {"content": url}], "data_source": url}]}),
        (f"{RUN}/prompts", {"prompts": [PROMPT | {"extra_info": {"images": [url], "path": url}, "ground_truth": url}]}),
        (f"{RUN}/evaluations", {"evaluation_id": "e", "prompts": [PROMPT | {"agent_name": url}]}),
        ("/v1/tasks", {"tasks": [{"payload": {"url": url}}]}),
    ]
    for path, body in texts:
        assert (await gateway.rest.post(path, json=body)).status_code in (200, 400), path
    assert bait.num_connections == 0


@pytest.mark.parametrize("column", ["prompt", "images", "data_source", "loader"])
async def test_an_address_in_a_dataset_is_text_or_refused(talking: Talking, bait: Bait, column: str) -> None:
    gateway, _ = talking
    headers = {"Content-Type": "application/x-ndjson"}
    for number, url in enumerate(addresses(bait)):
        row = {"prompt": "abc"} | {column: [url] if column == "images" else url}
        place = f"{RUN}/datasets/{column}{number}"
        stored = await gateway.rest.put(place, content=json.dumps(row) + "\n", headers=headers)
        assert stored.status_code == (400 if column == "images" else 200), stored.text
        if column != "images":
            assert (await gateway.rest.post(f"{place}:submit", json={})).status_code == 200
    for name in ("..%2Fsecret", "%2Fetc%2Fhostname", "file:%2F%2F%2Fetc%2Fhostname"):
        assert (await gateway.rest.get(f"{RUN}/datasets/{name}")).status_code in (400, 404)
    assert bait.num_connections == 0
