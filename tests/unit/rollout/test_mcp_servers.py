"""Tools of MCP servers, with real server processes: over standard input and output, and over HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import ValidationError

from penstock.config.rollout import AgentsConfig, McpServer
from penstock.errors import ConfigError
from penstock_rollout.agents.declarations import load_tools
from penstock_rollout.agents.loops import Agents, tool_agent
from penstock_rollout.agents.tools import ToolError
from penstock_rollout.tokenization import Tokenization
from support.processes import until
from support.scripted_engines import END, ScriptedEngine, called, make_context, make_tokenizer_folder, spelled

SERVER = """
import json, os, sys

def tool(name, description, **properties):
    types = {key: {"type": kind} for key, kind in properties.items()}
    schema = {"type": "object", "properties": types, "required": list(properties)}
    return {"name": name, "description": description, "inputSchema": schema}

TOOLS = [
    tool("add", "Adds two numbers.", a="integer", b="integer"), tool("fail", ""), tool("hang", ""), tool("die", ""),
    tool("environment", "", variable="string"),
]

def call(name, arguments):
    if name == "die":
        os._exit(3)
    if name == "add":
        return str(arguments["a"] + arguments["b"])
    if name == "environment":
        return f"{os.environ.get(arguments['variable'])} {os.getpid()}"
    raise ValueError("no luck")

def answer(method, params):
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "test", "version": "1"}}
    if method == "tools/list":
        return {"tools": TOOLS}
    try:
        content, failed = call(params["name"], params.get("arguments") or {}), False
    except Exception as error:
        content, failed = str(error), True
    return {"content": [{"type": "text", "text": content}], "isError": failed}

for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request or request.get("params", {}).get("name") == "hang":
        continue
    reply = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] in ("initialize", "tools/list", "tools/call"):
        reply["result"] = answer(request["method"], request.get("params") or {})
    else:
        reply["error"] = {"code": -32601, "message": "Method not found"}
    print(json.dumps(reply), flush=True)
"""
"""A server without imports, because the official one takes seconds to start."""
OFFICIAL = '''
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")

@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)

if len(sys.argv) > 1:
    server.run(sys.argv[2], host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="mcp is not installed"),
]


@pytest.fixture(scope="module")
def tokenization(tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    return Tokenization(make_tokenizer_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("server") / "server.py"
    path.write_text(SERVER)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agents(tokenization: Tokenization, program: Path) -> AsyncIterator[Agents]:
    os.environ["PENSTOCK_TEST_TOKEN"], os.environ["PENSTOCK_TEST_SECRET"] = "token", "secret"
    settings = {"command": [sys.executable, str(program)], "pass_env": ["PENSTOCK_TEST_TOKEN"], "timeout_s": 60}
    loaded = Agents.load(AgentsConfig(mcp_servers={"calculator": settings}), 4096, tokenization)  # type: ignore[dict-item]
    await loaded.open()
    yield loaded
    await loaded.close()


async def call(agents: Agents, name: str, **arguments: Any) -> str:
    text, _, _ = await agents.toolbox.tools[name].execute("0", arguments)  # type: ignore[misc]
    return str(text)


async def test_the_model_calls_a_tool_of_a_server(agents: Agents, tokenization: Tokenization) -> None:
    tools = list(agents.toolbox.tools.values())
    assert [tool.name for tool in tools] == ["add", "fail", "hang", "die", "environment"]
    schema = agents.toolbox.tools["add"].tool_schema["function"]
    assert schema["description"] == "Adds two numbers." and schema["parameters"]["required"] == ["a", "b"]
    body = json.dumps({"name": "add", "arguments": {"a": 40, "b": 2}})
    bad = json.dumps({"name": "add", "arguments": {"a": "x"}})
    engine = ScriptedEngine([called(body), called(bad), called('{"name": "fail"}'), (*spelled("42"), END)])
    episode = await tool_agent(make_context(engine, tokenization, tools=tools))
    text = tokenization.text(episode.token_ids.tolist())
    assert "[42]" in text
    assert text.count("[Error: ") == 2 and "no luck" in text, "errors are results that the model reads"
    assert episode.reward_parts == {"add/calls": 1}


async def test_a_server_that_ends_is_started_again(agents: Agents) -> None:
    before = await call(agents, "environment", variable="PENSTOCK_TEST_TOKEN")
    with pytest.raises(ToolError, match="die cannot be reached"):
        await call(agents, "die")
    both = await asyncio.gather(*(call(agents, "environment", variable="PENSTOCK_TEST_TOKEN") for _ in range(2)))
    assert both[0] == both[1], "one new process for all calls"
    (token, old), (_, new) = before.split(), both[0].split()
    assert (token, old != new) == ("token", True)
    assert (await call(agents, "environment", variable="PENSTOCK_TEST_SECRET")).startswith("None ")


async def test_a_call_has_a_deadline(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    [server] = agents.mcp_servers
    monkeypatch.setattr(server, "settings", server.settings.model_copy(update={"timeout_s": 0.2}))
    with pytest.raises(ToolError, match=r"hang did not answer within 0\.2 s"):
        await call(agents, "hang")
    monkeypatch.undo()
    assert await call(agents, "add", a=1, b=1) == "2", "the connection is still good"


@pytest.fixture
def official(tmp_path: Path) -> Path:
    path = tmp_path / "official.py"
    path.write_text(OFFICIAL)
    return path


@pytest.fixture
def port(official: Path, transport: str) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(official), str(number), transport.replace("_", "-")], stderr=subprocess.DEVNULL
    )
    yield number
    process.terminate()
    process.wait(60)


@pytest.mark.long
@pytest.mark.parametrize(("transport", "path"), [("streamable_http", "mcp"), ("sse", "sse")])
async def test_a_server_over_http(tokenization: Tokenization, port: int, transport: str, path: str) -> None:
    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    await asyncio.to_thread(until, answers, "the HTTP server")
    url = f"http://127.0.0.1:{port}/{path}"
    settings = {"url": url, "transport": transport, "tools": ["add"], "prefix": "remote_"}
    loaded = Agents.load(AgentsConfig(mcp_servers={"http": settings}), 4096, tokenization)  # type: ignore[dict-item]
    await loaded.open()
    assert list(loaded.toolbox.tools) == ["remote_add"]
    assert await call(loaded, "remote_add", a=1, b=2) == "3"
    await loaded.close()


@pytest.mark.long
async def test_a_server_of_the_official_package(tokenization: Tokenization, official: Path) -> None:
    settings = {"command": [sys.executable, str(official)], "connect_timeout_s": 120}
    loaded = Agents.load(AgentsConfig(mcp_servers={"official": settings}), 4096, tokenization)  # type: ignore[dict-item]
    await loaded.open()
    assert await call(loaded, "add", a=1, b=2) == "3"
    with pytest.raises(ToolError):
        await call(loaded, "add", a="x")
    await loaded.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"command": ["/no/such/program"]}, "cannot connect to /no/such/program"),
        ({"command": [sys.executable, "-c", "pass"]}, "cannot connect to"),
        (
            {"command": [sys.executable, "-c", "import sys; sys.stdin.read()"], "connect_timeout_s": 0.3},
            "no answer within 0.3 s",
        ),
        ({"url": "http://127.0.0.1:1/mcp"}, "cannot connect to http://127.0.0.1:1/mcp"),
    ],
)
async def test_a_server_that_cannot_be_reached_is_named(
    tokenization: Tokenization, settings: dict[str, Any], why: str
) -> None:
    loaded = Agents.load(AgentsConfig(mcp_servers={"broken": settings}), 4096, tokenization)  # type: ignore[dict-item]
    with pytest.raises(ConfigError) as raised:
        await loaded.open()
    await loaded.close()
    assert str(raised.value).startswith("rollout.agents.mcp_servers.broken: ") and why in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_a_tool_that_the_server_lacks_is_named(tokenization: Tokenization, program: Path) -> None:
    settings = {"command": [sys.executable, str(program)], "tools": ["multiply"]}
    loaded = Agents.load(AgentsConfig(mcp_servers={"c": settings}), 4096, tokenization)  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"mcp_servers\.c\.tools: the server has no tool 'multiply'; it has: add"):
        await loaded.open()
    await loaded.close()


async def test_the_servers_of_a_tools_file_of_verl_are_refused(tmp_path: Path) -> None:
    block = {"mcp_servers_config_path": "./servers.json"}
    entry = {"class_name": "verl.tools.mcp_base_tool.MCPBaseTool", "config": {"type": "mcp"}, "mcp": block}
    file = tmp_path / "tools.yaml"
    file.write_text(json.dumps({"tools": [entry]}))
    with pytest.raises(ConfigError, match=r"tools\.0: .* into the config, as `rollout\.agents\.mcp_servers: "):
        load_tools(file)


async def test_a_server_has_one_address() -> None:
    with pytest.raises(ValidationError, match="either `command` or `url`"):
        McpServer(command=["a"], url="http://b")
