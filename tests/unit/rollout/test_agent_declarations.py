"""Agents, tools and interactions are loaded before the server starts, and each mistake is explained in one line."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock.config.rollout import AgentsConfig
from penstock.errors import ConfigError, InvalidInput
from penstock.trajectory import Prompt
from penstock_rollout.agents.loops import Agents
from penstock_rollout.agents.tool_calls import find_explanation
from penstock_rollout.tokenization import Tokenization
from support.scripted_engines import CHATML, make_tokenizer_folder

CODE = """
from penstock_rollout.agents.interactions import Interaction
from penstock_rollout.agents.tools import Tool

NUMBER = 3

class Echo(Tool):
    async def execute(self, instance_id, parameters, **kwargs):
        return str(parameters) + self.config.get("suffix", "")

class Broken(Tool):
    def __init__(self, config, tool_schema):
        raise RuntimeError("no licence")

class Teacher(Interaction):
    pass

async def my_agent(context):
    return None

def not_async(context):
    return None
"""
TOOL = """
tools:
  - class_name: {file}:{name}
    config: {{suffix: "!"}}
    tool_schema:
      type: function
      function: {{name: echo, description: says it again, parameters: {{type: object}}, strict: true}}
"""
INTERACTION = """
interaction:
  - name: teacher
    class_name: {file}:{name}
"""


@pytest.fixture(scope="module")
def tokenization(tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    return Tokenization(make_tokenizer_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def load(tokenization: Tokenization, **config: Any) -> Agents:
    return Agents.load(AgentsConfig(**config), 4096, tokenization)


def written(folder: Path, text: str) -> Path:
    path = folder / "declared.yaml"
    path.write_text(text)
    return path


def test_tools_interactions_and_agents_are_loaded_once(tokenization: Tokenization, code: Path, tmp_path: Path) -> None:
    tools = written(tmp_path, TOOL.format(file=code, name="Echo"))
    interactions = tmp_path / "interactions.yaml"
    interactions.write_text(INTERACTION.format(file=code, name="Teacher"))
    agents = load(tokenization, tools_file=tools, interactions_file=interactions, custom={"mine": f"{code}:my_agent"})
    echo = agents.toolbox.tools["echo"]
    assert echo.config == {"suffix": "!"}
    assert echo.tool_schema["function"]["strict"] is True, "the schema reaches the template as it was written"
    teacher = agents.interactions["teacher"]
    assert type(echo).__module__ == type(teacher).__module__ == agents.find("mine").__module__, (
        "a file is imported once"
    )


def test_a_dotted_class_name_works_as_in_verl(
    tokenization: Tokenization, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code.rename(tmp_path / "dotted_tools.py")
    path = written(tmp_path, TOOL.format(file="dotted_tools", name="Echo").replace("dotted_tools:", "dotted_tools."))
    assert list(load(tokenization, tools_file=path).toolbox.tools) == ["echo"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tools: [", "is not YAML"),
        ("tools: []", "tools: must be at least 1 item long, not []"),
        ("tool: []", "unknown key 'tool'; did you mean 'tools'?"),
        (TOOL.partition("    tool_schema")[0], "tools.0.tool_schema is missing"),
        (TOOL.replace("name: echo, ", ""), "tools[0].tool_schema.function.name is missing; give text"),
        (
            TOOL.replace("type: function", "type: retrieval"),
            "tools[0].tool_schema.type: must be function, not 'retrieval'",
        ),
        (TOOL.replace("config", "confg"), "unknown key 'tools[0].confg'; did you mean 'config'?"),
        (TOOL + TOOL.replace("\ntools:", ""), "tools.1: a tool 'echo' was declared already"),
        (TOOL.replace("{name}", "Ekko"), "has no 'Ekko'"),
        (TOOL.replace("{name}", "NUMBER"), "is not a subclass of penstock_rollout.agents.tools.Tool"),
        (TOOL.replace("{name}", "Teacher"), "is not a subclass of penstock_rollout.agents.tools.Tool"),
        (TOOL.replace("{name}", "Broken"), "cannot be created: RuntimeError('no licence')"),
        (TOOL.replace("{file}", "no_such_package.tools"), "there is no module no_such_package"),
        (TOOL.replace("{file}", "no/such.py"), "there is no file no/such.py"),
        (TOOL.replace("{file}:{name}", "Echo"), "'Echo' is not an import path"),
    ],
)
def test_a_wrong_tools_file_is_explained_in_one_line(
    tokenization: Tokenization, code: Path, tmp_path: Path, text: str, why: str
) -> None:
    path = written(tmp_path, text.format(file=code, name="Echo") if "{{" in text else text)
    with pytest.raises(ConfigError) as raised:
        load(tokenization, tools_file=path)
    assert why in str(raised.value)
    assert str(raised.value).startswith(f"rollout.agents.tools_file {path}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            INTERACTION + INTERACTION.replace("\ninteraction:", ""),
            "interaction.1: an interaction 'teacher' was declared",
        ),
        (
            INTERACTION.replace("{name}", "Echo"),
            "is not a subclass of penstock_rollout.agents.interactions.Interaction",
        ),
        ("interaction: 3", "interaction: must be a list, not 3"),
    ],
)
def test_a_wrong_interactions_file_is_explained_in_one_line(
    tokenization: Tokenization, code: Path, tmp_path: Path, text: str, why: str
) -> None:
    path = written(tmp_path, text.format(file=code, name="Teacher"))
    with pytest.raises(ConfigError) as raised:
        load(tokenization, interactions_file=path)
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("custom", "why"),
    [
        ({"mine": "{code}:not_async"}, "rollout.agents.custom.mine: .* is not an `async def` function"),
        ({"tool_agent": "{code}:my_agent"}, "built-in agent"),
        ({"mine": "penstock_rollout.agents.loops:nothing"}, "has no 'nothing'"),
    ],
)
def test_a_wrong_custom_agent_is_refused(
    tokenization: Tokenization, code: Path, custom: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        load(tokenization, custom={name: path.format(code=code) for name, path in custom.items()})


def test_a_file_that_fails_on_import_is_refused(tokenization: Tokenization, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import no_such_thing_at_all")
    with pytest.raises(ConfigError, match=r"bad\.py fails on import: ModuleNotFoundError"):
        load(tokenization, custom={"mine": f"{tmp_path}/bad.py:agent"})


def test_a_prompt_cannot_make_the_server_import_anything(tokenization: Tokenization, code: Path) -> None:
    with pytest.raises(InvalidInput, match="unknown agent"):
        load(tokenization).find(f"{code}:my_agent")


def test_an_unknown_agent_names_the_nearest(tokenization: Tokenization) -> None:
    with pytest.raises(InvalidInput, match="did you mean 'tool_agent'"):
        load(tokenization).find("tools_agent")


def test_an_unknown_default_agent_is_found_at_the_start(tokenization: Tokenization) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.agents\.default_agent: unknown agent 'tool_agnt'; did you mean"):
        load(tokenization, default_agent="tool_agnt")


def test_a_template_that_refuses_tools_is_found_at_the_start(tmp_path: Path, code: Path) -> None:
    refusal = "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    strict = CHATML.replace("{% for message in messages %}", "{% for message in messages %}" + refusal)
    tokenization = Tokenization(make_tokenizer_folder(tmp_path / "model", strict))
    with pytest.raises(ConfigError, match="cannot render a tool message: .*no tools here"):
        load(tokenization, tools_file=written(tmp_path, TOOL.format(file=code, name="Echo")))


HIDES_TOOLS = CHATML.replace("{% if tools %}", "{% if false %}")
HIDES_SYSTEM = HIDES_TOOLS.replace("{% else %}", "{% elif message.role != 'system' %}")
REFUSES_SYSTEM = HIDES_TOOLS.replace(
    "{% else %}", "{% elif message.role == 'system' %}{{ raise_exception('no') }}{% else %}"
)


@pytest.mark.parametrize(
    ("template", "show_tools", "why"),
    [
        (CHATML, "template", ""),
        (HIDES_TOOLS, "template", "does not show the model tools; set rollout.agents.show_tools to prompt, or to own"),
        (HIDES_TOOLS, "own", ""),
        (HIDES_TOOLS, "prompt", ""),
        (HIDES_SYSTEM, "prompt", "does not show the model a system message; set rollout.agents.show_tools to own"),
        (
            REFUSES_SYSTEM,
            "prompt",
            "does not show the model a system message (messages: the model's chat template cannot",
        ),
        (HIDES_SYSTEM, "own", ""),
    ],
)
def test_a_template_that_hides_tools_is_refused(
    tmp_path: Path, code: Path, template: str, show_tools: str, why: str
) -> None:
    explain = find_explanation("hermes", "") if show_tools == "prompt" else None
    tokenization = Tokenization(make_tokenizer_folder(tmp_path / "model", template), explain=explain)
    with pytest.raises(ConfigError) if why else nullcontext() as raised:
        load(tokenization, tools_file=written(tmp_path, TOOL.format(file=code, name="Echo")), show_tools=show_tools)
    if raised is not None:
        assert why in str(raised.value) and "\n" not in str(raised.value)


def test_without_tools_the_template_need_not_show_them(tmp_path: Path) -> None:
    load(Tokenization(make_tokenizer_folder(tmp_path / "model", HIDES_TOOLS)))


@pytest.mark.parametrize(
    ("agent", "extra_info", "offered"),
    [
        ("single_turn_agent", {}, []),
        ("interaction_agent", {}, []),
        ("tool_agent", {}, ["echo"]),
        ("tool_agent", {"tools_kwargs": None}, ["echo"]),
        ("tool_agent", {"need_tools_kwargs": True, "tools_kwargs": {"echo": {}}}, ["echo"]),
        ("tool_agent", {"need_tools_kwargs": True, "tools_kwargs": {"echo": None}}, []),
    ],
)
def test_which_tools_a_prompt_is_offered(
    tokenization: Tokenization, code: Path, tmp_path: Path, agent: str, extra_info: dict[str, Any], offered: list[str]
) -> None:
    agents = load(tokenization, tools_file=written(tmp_path, TOOL.format(file=code, name="Echo")))
    assert list(agents.toolbox_for(Prompt(agent_name=agent, extra_info=extra_info)).tools) == offered


def test_arguments_for_an_undeclared_tool_are_refused(tokenization: Tokenization, code: Path, tmp_path: Path) -> None:
    agents = load(tokenization, tools_file=written(tmp_path, TOOL.format(file=code, name="Echo")))
    with pytest.raises(InvalidInput, match="there is no tool 'ekko'; tools: echo"):
        agents.toolbox_for(Prompt(agent_name="tool_agent", extra_info={"tools_kwargs": {"ekko": {}}}))
