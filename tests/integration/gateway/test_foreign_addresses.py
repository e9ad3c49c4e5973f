"""No address and no path that a client, a dataset, a model or a service has written is ever opened.

A real server listens on loopback, where a gateway and a rollout server could reach it, and counts who connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio as redis
from prometheus_client import CollectorRegistry

from penstock.config.rollout import AgentsConfig, EngineConfig, McpServer, RewardConfig, RolloutConfig
from penstock.config.run import RunConfig
from penstock.internal_calls import ClusterKey
from penstock_rollout import server as server_module
from penstock_rollout.server import assemble
from support.gateways import PROMPT, RUN, Gateway, run_config, running
from support.scripted_engines import TalkingEngine, make_tokenizer_folder
from support.tiny_models import write_qwen2

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


class Services:
    """The operator's reward, search and MCP services. They answer every call with a redirect or a link to the bait."""

    def __init__(self, bait: Bait) -> None:
        self.bait = bait
        self.url = ""
        self.calls: Counter[str] = Counter()
        self.events: asyncio.Queue[bytes] = asyncio.Queue()
        """What the MCP server with server-sent events has still to send. Nothing ends its connection."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            method, path, _ = (await reader.readline()).decode().split()
            length = 0
            while line := (await reader.readline()).strip().lower():
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            body = json.loads(await reader.readexactly(length) or b"{}")
            if method == "GET":
                await self._send_events(path, writer)
            else:
                writer.write(self._reply(path, body))
                await writer.drain()
        writer.close()

    def _reply(self, path: str, body: dict[str, Any]) -> bytes:
        asked = body.get("method", "")
        self.calls[path] += asked in ("", "tools/call")  # a reward and a search have no method
        if asked == "" or (asked == "tools/call" and path == "/mcp"):
            return f"HTTP/1.1 307 Elsewhere\r\nLocation: {self.bait.url}\r\nContent-Length: 0\r\n\r\n".encode()
        results = {
            "initialize": {"protocolVersion": body.get("params", {}).get("protocolVersion"), "capabilities":
                           {"tools": {}}, "serverInfo": {"name": "test", "version": "1"}},
            "tools/list": {"tools": [{"name": "fetch", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": [{"type": "resource_link", "uri": self.bait.url, "name": "link"}]},
        }  # fmt: skip
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": body.get("id")}
        reply |= {"result": results[asked]} if asked in results else {"error": {"code": -32601, "message": "no"}}
        content = json.dumps(reply).encode() if "id" in body else b""
        if path == "/messages" and content:
            self.events.put_nowait(b"event: message\ndata: " + content + b"\n\n")
            content = b""
        status = b"200 OK\r\nContent-Type: application/json" if content else b"202 Accepted"
        return b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (status, len(content), content)

    async def _send_events(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path != "/sse":
            writer.write(b"HTTP/1.1 405 No\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nevent: endpoint\ndata: /messages\n\n")
        await writer.drain()
        while event := await self.events.get():
            writer.write(event)
            await writer.drain()


CALLS = """
from penstock_rollout.agents.tool_calls import ToolCall

def parse(text):
    arguments = {{"query": {url!r}, "url": {url!r}, "uri": {url!r}, "path": "file:///etc/hostname"}}
    return [ToolCall(name, arguments) for name in ("find", "http_fetch", "sse_fetch")]
"""
"""Takes whatever the random model writes for calls of all tools."""


def config_with_tools(redis_url: str, folder: Path, services: Services) -> RunConfig:
    make_tokenizer_folder(folder)
    write_qwen2(folder)
    every_id = [*range(json.loads((folder / "config.json").read_text())["vocab_size"])]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": every_id}))
    (folder / "calls.py").write_text(CALLS.format(url=services.bait.url))
    agents = AgentsConfig.model_validate(
        {
            "default_agent": "tool_agent", "max_turns": 2, "tool_format": f"{folder}/calls.py:parse",
            "tools": {"find": {"kind": "search", "url": f"{services.url}/search"}},
            "mcp_servers": {
                "http": McpServer(url=f"{services.url}/mcp", prefix="http_"),
                "sse": McpServer(url=f"{services.url}/sse", prefix="sse_", transport="sse"),
            },
        }
    )  # fmt: skip
    reward = RewardConfig.model_validate({"default": {"kind": "remote", "url": f"{services.url}/reward"}})
    rollout = RolloutConfig(
        agents=agents, reward=reward, engine=EngineConfig(name="torch", max_model_len=900), num_servers=1
    )
    return run_config(redis_url, folder).model_copy(update={"rollout": rollout})


async def finished(gateway: Gateway, prompt_id: int, serving: asyncio.Task[None]) -> httpx.Response:
    """The prompt's record, once a server has answered it or has ended. The server starts its engine meanwhile."""
    async with asyncio.timeout(200):
        while True:
            record = await gateway.rest.get(f"{RUN}/prompts/{prompt_id}:wait", params={"timeout_s": 15})
            if serving.done() or record.json()["state"] not in ("PENDING", "LEASED"):
                return record


@pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="mcp is not installed")
async def test_a_rollout_server_opens_only_what_its_config_names(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path, bait: Bait, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither addresses in prompts, rows and calls of the model, nor redirects, nor proxies of the environment."""
    services, url = Services(bait), bait.url
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, url.removesuffix("/latest/meta-data"))
        monkeypatch.setenv(name.upper(), url.removesuffix("/latest/meta-data"))
    monkeypatch.setattr(server_module, "REGISTRY", CollectorRegistry())
    message = {"role": "user", "content": f"![]({url}) <img src={url}>"}
    kwargs = {"find": {"create_kwargs": {"url": url}, "execute_kwargs": {"url": url}}}
    prompt = PROMPT | {
        "messages": [message], "ground_truth": url, "data_source": url, "num_samples": 1,
        "extra_info": {"url": url, "images": [url], "tools_kwargs": kwargs},
    }  # fmt: skip
    row = {"prompt": [message], "data_source": url, "extra_info": {"tools_kwargs": kwargs, "images": [url]}}
    async with await asyncio.start_server(services.answer, "127.0.0.1", 0) as listener:
        services.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        config = config_with_tools(redis_process.url, tmp_path, services)
        ClusterKey.of(config).make_if_missing()
        server = assemble(config, "r0")
        serving = asyncio.create_task(server.run())
        try:
            async with running(config) as gateway:
                assert (await gateway.rest.post(f"{RUN}/prompts", json={"prompts": [prompt]})).status_code == 200
                place, headers = f"{RUN}/datasets/x", {"Content-Type": "application/x-ndjson"}
                stored = await gateway.rest.put(place, content=json.dumps(row) + "\n", headers=headers)
                assert stored.status_code == 200, stored.text
                assert (await gateway.rest.post(f"{place}:submit", json={"num_samples": 1})).status_code == 200
                for prompt_id in (1, 2):
                    ended = await finished(gateway, prompt_id, serving)
                    assert ended.json()["state"] == "QUEUED", (ended.text, serving)
        finally:
            server.stopping.set()
            async with asyncio.timeout(100):
                await serving
            services.events.put_nowait(b"")
    assert services.calls == {"/reward": 2, "/search": 2, "/mcp": 2, "/messages": 2}
    assert bait.num_connections == 0
