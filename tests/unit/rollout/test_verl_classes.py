"""Tools and interactions that were written for verl run unchanged, without verl."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.config.rollout import AgentsConfig
from penstock.errors import ConfigError
from penstock.user_code import load_object
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
    why = r"checks\.py fails on import: .*verl.*; without verl only its BaseTool and BaseInteraction work; install verl"
    with pytest.raises(ConfigError, match=why) as raised:
        load(tokenization, tmp_path, code=f"{line}\n{TOOL}")
    assert "\n" not in str(raised.value)
    assert "verl" not in sys.modules


AGENT, SCORE = "write the agent loop as an `async def`", "write the reward manager as `compute_score`"
PAGE = "docs/coming-from-verl.md#porting-classes"


@pytest.mark.parametrize(
    ("code", "way"),
    [
        ("import verl.utils.profiler\nfrom verl.experimental.agent_loop.agent_loop import AgentLoopBase", AGENT),
        ("from verl.experimental import agent_loop", AGENT),
        ("from recipe.langgraph_agent.react_agent_loop import ReactAgentLoop", AGENT),
        ("from verl.tools.function_tool import function_tool", "write the function as a tool class"),
        ("from verl import DataProto\nfrom verl.workers.reward_manager import register", SCORE),
        ("from verl import DataProto", SCORE),
        ("from verl.utils.dataset.rl_dataset import RLHFDataset", "write the dataset as a function that returns rows"),
        (
            "from verl.utils.reward_score.math_dapo import compute_score",
            "choose them in rollout.reward by `kind: verl`",
        ),
        ("import verl", "install verl, or port the code"),
    ],
)
def test_code_for_verl_is_refused_with_the_way_to_port_it(tmp_path: Path, code: str, way: str) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ConfigError, match=r"field: .*mine\.py fails on import: ModuleNotFoundError: .*") as raised:
        load_object(f"{tmp_path}/mine.py:Mine", "field")
    assert str(raised.value).endswith(f"{way}: {PAGE}") and "\n" not in str(raised.value)


def test_a_class_of_verl_by_name_is_refused_with_the_way_to_port_it(tokenization: Tokenization, tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools:\n  - class_name: verl.tools.geo3k_tool.Geo3kTool\n    tool_schema: {SCHEMA}\n")
    with pytest.raises(ConfigError, match=r"no module verl\.tools\.geo3k_tool; .*or port the code") as raised:
        Agents.load(AgentsConfig(tools_file=file), 4096, tokenization)
    assert str(raised.value).endswith(PAGE)


def test_an_agent_loop_is_refused_with_verl_installed(
    tokenization: Tokenization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("verl", "verl.experimental", "verl.experimental.agent_loop"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    base = type("AgentLoopBase", (), {"__module__": "verl.experimental.agent_loop.agent_loop"})
    sys.modules["verl.experimental.agent_loop"].AgentLoopBase = base  # type: ignore[attr-defined]
    (tmp_path / "mine.py").write_text(
        "from verl.experimental.agent_loop import AgentLoopBase\nclass Mine(AgentLoopBase): ..."
    )
    with pytest.raises(ConfigError, match=f"was written for verl and cannot run here; {AGENT}: {PAGE}"):
        Agents.load(AgentsConfig(custom={"mine": f"{tmp_path}/mine.py:Mine"}), 4096, tokenization)


GSM8K_TOOL = f"""
tools:
  - {{class_name: verl.tools.gsm8k_tool.Gsm8kTool, config: {{type: native}}, tool_schema: {SCHEMA}}}
"""
GSM8K_INTERACTION = "interaction:\n  - class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction\n"


async def test_verls_classes_for_gsm8k_run_by_name(tokenization: Tokenization, tmp_path: Path) -> None:
    tools, interactions = tmp_path / "tools.yaml", tmp_path / "interactions.yaml"
    tools.write_text(GSM8K_TOOL)
    interactions.write_text(GSM8K_INTERACTION)
    agents = Agents.load(AgentsConfig(tools_file=tools, interactions_file=interactions), 4096, tokenization)
    turns = [check("11"), check("12"), check("12"), (*spelled("12"), END)]
    episode = await sample(agents, tokenization, *turns, tools_kwargs=CHECK)
    assert (episode.tool_rewards, episode.final_reward) == ((-0.05, 0.0, -0.05), 1.0), "only a better answer is free"
    assert "Your answer 12 has the score 1." in tokenization.text(episode.token_ids.tolist())
    assert not agents.toolbox.tools["check"]._tool._scores, "nothing is kept"  # type: ignore[attr-defined]
    [interaction] = agents.interactions.values()
    await interaction.start_interaction("0", ground_truth="12")
    for content, is_right in (("so 12", False), ("so #### 11", False), ("so #### 12", True)):
        said = [{"role": "user", "content": "#### 12"}, {"role": "assistant", "content": content}]
        done, _, score, _ = await interaction.generate_response("0", said, ground_truth="12")
        assert (done, score) == (is_right, float(is_right)), "the number after #### counts"
    await interaction.finalize_interaction("0", ground_truth="12")


async def test_the_ported_classes_of_the_page_run(tokenization: Tokenization, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "coming-from-verl.md").read_text()
    code = page.partition("## Porting classes")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "ported.py").write_text(code)
    twice, double, score, rows = (
        load_object(f"{tmp_path}/ported.py:{name}", "field") for name in ("twice", "Double", "compute_score", "sums")
    )
    turns = [(*spelled("12"), END), (*spelled("13"), END)]
    episode = await twice(make_context(ScriptedEngine(turns), tokenization))
    assert "Sure?" in tokenization.text(episode.token_ids.tolist()) and episode.num_turns == 2
    assert await double({}, {}).execute("0", {"number": 21}) == "42"
    assert score(data_source="", solution_str="1", ground_truth="1", extra_info={}) == 1
    (tmp_path / "lines.txt").write_text("1+1")
    assert rows(files=[str(tmp_path / "lines.txt")]) == [{"prompt": [{"role": "user", "content": "1+1"}]}]
