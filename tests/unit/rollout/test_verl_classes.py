"""Tools and interactions that were written for verl run unchanged, without verl."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config.rollout import AgentsConfig
from penstock.errors import ConfigError
from penstock_rollout.agents.episode import Episode
from penstock_rollout.agents.loops import Agents, interaction_agent, tool_agent
from penstock_rollout.tokenization import Tokenization
from support.scripted_engines import END, ScriptedEngine, called, make_context, make_tokenizer_folder, spelled

TOOL = """
import logging
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op

RELEASED = []

class CheckTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._answers = {}

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        own = "own-" + str(uuid4())
        self._answers[own] = {"truth": ground_truth, "answer": ""}
        return own, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        answer = str(parameters.get("answer", ""))
        self._answers[instance_id]["answer"] = "#### " + answer
        if answer == "picture":
            return ToolResponse(image=[b"png"]), 0.0, {}
        data = kwargs["agent_data"]
        text = f"{await self.calc_reward(instance_id)} {len(data.messages)} {kwargs['hint']} {self.name}"
        return ToolResponse(text=text), -0.05, {"status": "fine", "tries": 1, "error": None}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        state = self._answers[instance_id]
        return gsm8k.compute_score(state["answer"], state["truth"], method="flexible", format_score=0.0, score=1.0)

    async def release(self, instance_id: str, **kwargs) -> None:
        RELEASED.append(instance_id)
        del self._answers[instance_id]

class OwnSchema(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate(
            {"type": "function", "function": {"name": "own", "description": "d", "parameters": {
                "type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}, "required": []}}}
        )
"""
INTERACTION = """
from typing import Any, Optional
from verl.interactions.base import BaseInteraction

class GuessInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self.started, self.ended = {}, []

    async def start_interaction(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        self.started[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs):
        last = [message for message in messages if message["role"] == "assistant"][-1]["content"]
        right = await self.calculate_score(instance_id, last)
        return right == 1.0, "try again" if right < 1 else "right", right, {"name": self.name}

    async def calculate_score(self, instance_id: str, text: str = "", **kwargs) -> float:
        return float(text == self.started[instance_id])

    async def finalize_interaction(self) -> None:
        self.ended.append(1)
"""
TOOLS_FILE = """
tools:
  - class_name: "{file}:{name}"
    config: {{type: native}}
    tool_schema: {schema}
"""
SCHEMA = json.dumps(
    {"type": "function", "function": {"name": "check", "description": "checks an answer", "parameters": {
        "type": "object", "properties": {"answer": {"type": "string", "description": "the answer"}},
        "required": ["answer"]}}}
)  # fmt: skip
CHECK = {"check": {"create_kwargs": {"ground_truth": "12"}, "execute_kwargs": {"hint": "ok"}}}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl itself is installed")


@pytest.fixture(scope="module")
def tokenization(tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    return Tokenization(make_tokenizer_folder(tmp_path_factory.mktemp("model")))


def load(
    tokenization: Tokenization, folder: Path, name: str = "CheckTool", schema: str = SCHEMA, code: str = TOOL
) -> Agents:
    (folder / "checks.py").write_text(code)
    (folder / "guess.py").write_text(INTERACTION)
    tools, interactions = folder / "tools.yaml", folder / "interaction.yaml"
    tools.write_text(TOOLS_FILE.format(file=folder / "checks.py", name=name, schema=schema))
    interactions.write_text(f"interaction:\n  - class_name: {folder / 'guess.py'}:GuessInteraction\n    config: {{}}\n")
    return Agents.load(AgentsConfig(tools_file=tools, interactions_file=interactions), 4096, tokenization)


def check(answer: str) -> tuple[int, ...]:
    return called(json.dumps({"name": "check", "arguments": {"answer": answer}}))


async def sample(agents: Agents, tokenization: Tokenization, *turns: tuple[int, ...], **info: Any) -> Episode:
    engine = ScriptedEngine(turns)
    context = make_context(
        engine, tokenization, tools=list(agents.toolbox.tools.values()), extra_info=info,
        interactions=dict(agents.interactions),
    )  # fmt: skip
    return await (tool_agent if "tools_kwargs" in info else interaction_agent)(context)


async def test_a_tool_of_verl_runs_with_its_rows_arguments(tokenization: Tokenization, tmp_path: Path) -> None:
    agents = load(tokenization, tmp_path)
    turns = [check("3"), check("12"), (*spelled("12"), END)]
    episode = await sample(agents, tokenization, *turns, tools_kwargs=CHECK)
    text = tokenization.text(episode.token_ids.tolist())
    assert "[0.0 2 ok check]" in text and "[1.0 4 ok check]" in text, "one instance per sample, with its conversation"
    assert episode.turn_rewards == (-0.05, -0.05, 0.0)
    assert episode.tool_rewards == (-0.05, -0.05)
    assert episode.final_reward == 1.0, "calc_reward at the end of the sample"
    assert episode.reward_parts == {"check/tries": 2}, "texts among the metrics are left out"
    assert episode.info_for_rewards == {"num_turns": 6, "tool_rewards": [-0.05, -0.05], "turn_scores": []}
    loaded = sys.modules[type(agents.toolbox.tools["check"]._tool).__module__]  # type: ignore[attr-defined]
    assert len(loaded.RELEASED) == 1 and loaded.RELEASED[0].startswith("own-"), "released under the id it chose"


async def test_an_image_is_refused_and_not_dropped(tokenization: Tokenization, tmp_path: Path) -> None:
    agents = load(tokenization, tmp_path)
    episode = await sample(agents, tokenization, check("picture"), (*spelled("ok"), END), tools_kwargs=CHECK)
    assert "only text can be shown" in tokenization.text(episode.token_ids.tolist())


def test_a_tool_may_have_a_schema_of_its_own(tokenization: Tokenization, tmp_path: Path) -> None:
    agents = load(tokenization, tmp_path, "OwnSchema", "null")
    [schema] = agents.toolbox.schemas
    assert schema["function"]["parameters"]["properties"] == {"a": {"type": "array", "items": {"type": "string"}}}


async def test_an_interaction_of_verl_replies(tokenization: Tokenization, tmp_path: Path) -> None:
    agents = load(tokenization, tmp_path)
    turns = [(*spelled("11"), END), (*spelled("12"), END)]
    episode = await sample(agents, tokenization, *turns, interaction_kwargs={"name": "guess", "ground_truth": "12"})
    assert "try again" in tokenization.text(episode.token_ids.tolist())
    assert episode.turn_scores == episode.turn_rewards == (0.0, 1.0)
    assert episode.final_reward is None, "verl calls calculate_score for turns only"
    wrapped = agents.interactions["guess"]._interaction  # type: ignore[attr-defined]
    assert wrapped.ended == [1] and wrapped.config["name"] == wrapped.name == "guess"


def test_the_stand_ins_are_gone_after_the_import(tokenization: Tokenization, tmp_path: Path) -> None:
    load(tokenization, tmp_path)
    assert not [name for name in sys.modules if name == "verl" or name.startswith("verl.")]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("verl.tools.base_tool")


@pytest.mark.parametrize("line", ["from verl.tools.search_tool import SearchTool", "from verl.tools.schemas import X"])
def test_what_only_verl_has_is_named(tokenization: Tokenization, tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"checks\.py fails on import: .*verl") as raised:
        load(tokenization, tmp_path, code=f"{line}\n{TOOL}")
    assert "\n" not in str(raised.value)
    assert "verl" not in sys.modules
