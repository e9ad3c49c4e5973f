"""The built-in tools: programs in the sandbox, search in a local index and through a retrieval service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import ValidationError

from penstock.cli.main import main
from penstock.config.rollout import AgentsConfig
from penstock.errors import ConfigError
from penstock_rollout.agents.builtin_tools import RetrievalService
from penstock_rollout.agents.declarations import load_tools
from penstock_rollout.agents.loops import Agents, tool_agent
from penstock_rollout.tokenization import Tokenization
from support.scripted_engines import END, ScriptedEngine, called, make_context, make_tokenizer_folder, spelled

PASSAGES = [
    {"id": "0", "contents": '"Reykjavik"\nReykjavik is the capital of Iceland.'},
    {"id": "1", "contents": '"Lima"\nLima is the capital of Peru, on the coast.'},
    {"id": "2", "contents": '"Llama"\nLlamas live in Peru.'},
]
ENDLESS = "while True: pass"


@pytest.fixture(scope="module")
def tokenization(tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    return Tokenization(make_tokenizer_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "passages.jsonl"
    path.write_text("\n".join(json.dumps(passage) for passage in PASSAGES) + "\n")
    return path


async def opened(tokenization: Tokenization, tools: dict[str, Any]) -> Agents:
    agents = Agents.load(AgentsConfig(tools=tools), 4096, tokenization)
    await agents.open()
    return agents


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def python(tokenization: Tokenization) -> AsyncIterator[Callable[[str], Any]]:
    settings: dict[str, Any] = {"kind": "python", "num_processes": 1}
    agents = await opened(tokenization, {"py": settings | {"timeout_s": 60}, "impatient": settings | {"timeout_s": 2}})

    async def run(code: str) -> tuple[str, dict[str, float]]:
        tool = agents.toolbox.tools["impatient" if code == ENDLESS else "py"]
        text, reward, numbers = await tool.execute("0", {"code": code})  # type: ignore[misc]
        assert reward == 0.0
        return text, numbers

    yield run
    await agents.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("code", "text", "failed"),
    [
        ("print(1 + 1)\nprint('x')", "2\nx", 0),
        ("a = 20\na + 1", "21", 0),
        ("```python\nprint('fenced')\n```", "fenced", 0),
        ("a = 1", "(no output)", 0),
        ("print('before')\n1/0", "before\nTraceback", 1),
        ("def f(:", "SyntaxError", 1),
        ("import socket; socket.socket()", "PermissionError", 1),
        ("import sys; sys.exit(3)", "ended with code 3", 1),
        (ENDLESS, "took longer than 2 s", 1),
    ],
)
async def test_a_program_shows_what_it_printed(python: Callable[[str], Any], code: str, text: str, failed: int) -> None:
    shown, numbers = await python(code)
    assert shown == text if not failed else text in shown
    assert numbers == {"calls": 1, "failed": failed}
    assert "driver" not in shown, "tracebacks begin in the program"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_without_a_program_is_refused(python: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match='"code"'):
        await python(" ")


async def test_the_model_runs_a_program(tokenization: Tokenization) -> None:
    agents = await opened(tokenization, {"py": {"kind": "python"}})
    try:
        body = json.dumps({"name": "py", "arguments": {"code": "print(6*7)"}})
        engine = ScriptedEngine([called(body), (*spelled("42"), END)])
        context = make_context(engine, tokenization, tools=list(agents.toolbox.tools.values()))
        episode = await tool_agent(context)
    finally:
        await agents.close()
    assert "[42]" in tokenization.text(episode.token_ids.tolist())
    assert episode.reward_parts == {"py/calls": 1, "py/failed": 0}


async def test_a_local_index_finds_passages(tokenization: Tokenization, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    assert main(["search-index", str(corpus), "--out", str(folder)]) == 0
    tools = {"memory": {"kind": "search", "index": corpus, "top_k": 2}, "disk": {"kind": "search", "index": folder}}
    agents = await opened(tokenization, tools)
    for name in ("memory", "disk"):
        tool = agents.toolbox.tools[name]
        text, _, numbers = await tool.execute("0", {"query": "Which city is the capital of Peru?"})  # type: ignore[misc]
        first, second, *_ = text.splitlines()
        assert first == 'Doc 1 (Title: "Lima") Lima is the capital of Peru, on the coast.'
        assert second.startswith("Doc 2 (Title:"), "one that matches less"
        assert numbers["passages"] == (2 if name == "memory" else 3)
        nothing, _, _ = await tool.execute("0", {"query_list": ["zebra", "the"]})  # type: ignore[misc]
        assert nothing == "No passage was found.\n---\nNo passage was found."
    await agents.close()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "there is no passage"),
        ("{", "line 1 is not JSON"),
        ('{"title": "a"}', "passage 1 has neither"),
        (None, "does not exist"),
    ],
)
async def test_a_wrong_index_is_refused_in_one_line(
    tokenization: Tokenization, tmp_path: Path, content: str | None, why: str
) -> None:
    path = tmp_path / "passages.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=why) as raised:
        await opened(tokenization, {"search": {"kind": "search", "index": path}})
    assert str(raised.value).startswith("rollout.agents.tools.search.index: ")


async def test_a_retrieval_service_is_asked_in_search_r1s_shape() -> None:
    requests: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(json.loads(request.content))
        if len(requests) == 1:
            return httpx.Response(503)
        entries = [{"document": passage, "score": 1.0} for passage in PASSAGES]
        return httpx.Response(200, json={"result": [entries, PASSAGES]})

    service = RetrievalService("http://retrieval.test/retrieve", 5, 4, httpx.MockTransport(answer))
    found = await service.find(["a", "b"], 2)
    await service.close()
    assert requests == [{"queries": ["a", "b"], "topk": 2, "return_scores": True}] * 2
    assert found == [[passage["contents"] for passage in PASSAGES[:2]]] * 2


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (httpx.Response(400, text="no"), "answered 400"),
        (httpx.Response(200, json={"results": []}), "has no passages"),
        (httpx.Response(200, json={"result": []}), "answered 0 of 1 queries"),
    ],
)
async def test_a_wrong_answer_of_the_service_fails_the_call(response: httpx.Response, why: str) -> None:
    service = RetrievalService("http://retrieval.test", 5, 4, httpx.MockTransport(lambda request: response))
    with pytest.raises(RuntimeError, match=why):
        await service.find(["a"], 2)
    await service.close()


async def test_a_search_that_takes_too_long_fails(tokenization: Tokenization) -> None:
    tools = {"search": {"kind": "search", "url": "http://127.0.0.1:1/retrieve", "timeout_s": 0.05}}
    agents = await opened(tokenization, tools)
    with pytest.raises(RuntimeError, match=r"took longer than 0\.05 s"):
        await asyncio.wait_for(agents.toolbox.tools["search"].execute("0", {"query": "a"}), 60)
    await agents.close()


# ── verl's own classes in a tools file ──

SEARCH, SANDBOX = "verl.tools.search_tool.SearchTool", "verl.tools.sandbox_fusion_tools.SandboxFusionTool"


def tools_file(folder: Path, class_name: str, name: str | None, **config: Any) -> Path:
    schema = {"type": "function", "function": {"name": name, "description": "Its own.", "parameters": {}}}
    entry = {"class_name": class_name, "config": config} | ({"tool_schema": schema} if name else {})
    file = folder / "tools.yaml"
    file.write_text(json.dumps({"tools": [entry]}))
    return file


def test_verls_search_tool_asks_the_same_service(tokenization: Tokenization, tmp_path: Path) -> None:
    config = {"retrieval_service_url": "http://r/retrieve", "topk": 5, "timeout": 7, "num_workers": 9, "type": "native"}
    file = tools_file(tmp_path, SEARCH, "find", **config)
    tool = Agents.load(AgentsConfig(tools_file=file), 4096, tokenization).toolbox.tools["find"]
    assert tool.tool_schema["function"]["description"] == "Its own."
    taken = [tool.config[key] for key in ("kind", "url", "top_k", "timeout_s", "max_concurrent")]
    assert taken == ["search", "http://r/retrieve", 5, 7, 9]


async def test_verls_sandbox_tool_runs_programs_here(tokenization: Tokenization, tmp_path: Path) -> None:
    config = {"num_workers": 8, "rate_limit": 1, "default_timeout": 5}
    file = tools_file(tmp_path, SANDBOX, "code_interpreter", **config, memory_limit_mb=512)
    agents = Agents.load(AgentsConfig(tools_file=file), 4096, tokenization)
    tool = agents.toolbox.tools["code_interpreter"]
    assert (tool.config["num_processes"], tool.config["memory_bytes"], tool.config["timeout_s"]) == (1, 2**29, 5)
    await agents.open()
    text, _, _ = await tool.execute("0", {"code": "print(6*7)"})  # type: ignore[misc]
    await agents.close()
    assert text == "42"


@pytest.mark.parametrize(
    ("class_name", "name", "config", "why"),
    [
        (SEARCH, "search", {}, "tools.0.config: retrieval_service_url is missing"),
        (SEARCH, "search", {"retrieval_service_url": "http://r", "top_k": 3}, "unknown key 'top_k'"),
        (SANDBOX, "run", {"default_language": "cpp"}, "tools.0.config: default_language: must be"),
        (SANDBOX, None, {}, "tools.0.tool_schema is missing"),
        (
            SANDBOX,
            "run",
            {"sandbox_fusion_url": "http://s"},
            "tools.0.config: unknown key 'sandbox_fusion_url'; no such service is called: programs run in the rollout "
            "server's own sandbox; remove the key",
        ),
    ],
)
def test_what_verls_tools_do_not_have_here_is_refused(
    class_name: str, name: str | None, config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_tools(tools_file(tmp_path, class_name, name, **config))
    assert why in str(raised.value) and "\n" not in str(raised.value)


def test_a_search_has_one_source() -> None:
    with pytest.raises(ValidationError, match="either `index` or `url`"):
        AgentsConfig(tools={"search": {"kind": "search"}})  # type: ignore[dict-item]
