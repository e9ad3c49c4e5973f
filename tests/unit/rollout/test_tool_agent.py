"""The tool agent with a scripted engine: calls, errors, limits, rewards and cancellation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cancellation import end_task
from penstock.errors import InvalidInput
from penstock_rollout.agents.episode import Episode
from penstock_rollout.agents.loops import tool_agent
from penstock_rollout.agents.tool_calls import find_explanation
from penstock_rollout.agents.tools import Tool
from penstock_rollout.agents.transcript import AgentContext
from penstock_rollout.tokenization import Tokenization
from support.scripted_engines import (
    CHATML,
    END,
    PLAIN,
    ScriptedEngine,
    called,
    function_schema,
    make_context,
    make_tokenizer_folder,
    spelled,
)

ANSWER = (*spelled("ok"), END)


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


class Recorder(Tool):
    """Records its calls. `add` adds two numbers; the other names misbehave."""

    def __init__(self, name: str = "add", **config: Any) -> None:
        super().__init__(config, function_schema(name))
        self.events: list[tuple[Any, ...]] = []
        self.num_running = 0
        self.most_running = 0

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self.events.append(("create", instance_id, kwargs))
        if self.config.get("broken_create"):
            raise RuntimeError("no sandbox")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.events.append(("execute", parameters, kwargs))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if "sleep_s" in self.config:
                await asyncio.sleep(self.config["sleep_s"])
            if "answer" in self.config:
                return self.config["answer"]
            return str(parameters["a"] + parameters["b"]), 0.5, {"calls": 1}
        finally:
            self.num_running -= 1

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        self.events.append(("calc_reward", kwargs))
        reward: float | None = self.config.get("final")
        return reward

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.events.append(("release", instance_id, kwargs))

    @property
    def names(self) -> list[str]:
        return [event[0] for event in self.events]


@pytest.fixture(scope="module")
def tokenization(tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    folder: Path = tmp_path_factory.mktemp("model")
    return Tokenization(make_tokenizer_folder(folder))


def inserted_text(context: AgentContext, episode: Episode) -> str:
    """The text that was inserted between the model's turns."""
    return context.tokenization.tokenizer.decode(episode.token_ids[episode.loss_mask == 0].tolist())  # type: ignore[no-any-return]


def counted(context: AgentContext, tool: str, result: str) -> float:
    return context.metrics.registry.get_sample_value(
        "penstock_tool_calls_total", {"tool": tool, "result": result}
    ) or 0.0  # fmt: skip


async def test_a_tool_answers_and_the_model_goes_on(tokenization: Tokenization) -> None:
    tool = Recorder(final=2.0)
    first = called(call("add", a=2, b=3))
    context = make_context(ScriptedEngine([first, ANSWER]), tokenization, tools=[tool])
    episode = await tool_agent(context)
    assert tuple(episode.token_ids[: len(first)].tolist()) == first
    assert inserted_text(context, episode) == "\n<|start|>user\n[5]<|end|>\n<|start|>assistant\n"
    assert tuple(episode.token_ids[episode.last_turn_start :].tolist()) == ANSWER
    assert (episode.finish_reason, episode.turn_rewards, episode.final_reward) == ("stop", (0.5, 0.0), 2.0)
    assert episode.reward_parts == {"add/calls": 1}
    assert tool.names == ["create", "execute", "calc_reward", "release"]
    assert counted(context, "add", "ok") == 1


async def test_the_first_prompt_shows_the_tools(tokenization: Tokenization) -> None:
    context = make_context(ScriptedEngine([ANSWER]), tokenization, tools=[Recorder("divide")])
    await tool_agent(context)
    assert '"name": "divide"' in tokenization.raw_text(context.prompt_token_ids)


SYSTEM_LAST = (
    "{% for message in messages %}{% if message.role != 'system' %}"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}"
)
"""As templates that put the system message into the last turn."""


@pytest.mark.parametrize("template", [PLAIN, CHATML, SYSTEM_LAST])
async def test_tools_in_the_prompt_are_shown_once_and_never_change(tmp_path: Path, template: str) -> None:
    explained = Tokenization(make_tokenizer_folder(tmp_path, template), explain=find_explanation("hermes", ""))
    engine = ScriptedEngine([called(call("add", a=2, b=3)), ANSWER])
    await tool_agent(make_context(engine, explained, tools=[Recorder()]))
    first, second = (request.prompt_token_ids for request in engine.requests)
    shown = '{"type": "function", "function": {"name": "add"'
    assert second[: len(first)] == first and explained.raw_text(first).count(shown) == 1
    assert shown not in explained.raw_text(second[len(first) :])


def test_tools_in_the_prompt_keep_its_system_message(tokenization: Tokenization, tmp_path: Path) -> None:
    explained = Tokenization(make_tokenizer_folder(tmp_path, CHATML), explain=find_explanation("hermes", ""))
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    text = explained.first_text(chat, [{"function": {"name": "add"}}])
    assert text.startswith(
        '<|start|>system\nbe kind\n\nYou can call these functions:\n<tools>\n{"function": {"name": "add"'
    )
    assert text.count("<|start|>system") == 1 and text.endswith("hi<|end|>\n<|start|>assistant\n")
    later = [*chat, {"role": "assistant", "content": "ok"}, {"role": "tool", "content": "5"}]
    assert explained.first_text(later, [{"function": {"name": "add"}}]).startswith(text)
    assert explained.first_text(chat) == tokenization.first_text(chat), "without tools nothing is added"


async def test_calls_of_one_turn_run_at_the_same_time_and_answer_in_order(tokenization: Tokenization) -> None:
    tool = Recorder(sleep_s=0.05)
    calls = [called(call("add", a=index, b=10)) for index in range(3)]
    turn = (*(token for ids in calls for token in ids[:-1]), END)
    context = make_context(ScriptedEngine([turn, ANSWER]), tokenization, tools=[tool])
    episode = await tool_agent(context)
    assert tool.most_running == 3
    assert tool.names.count("create") == tool.names.count("release") == 1
    text = inserted_text(context, episode)
    assert text.index("[10]") < text.index("[11]") < text.index("[12]")
    assert episode.turn_rewards == (1.5, 0.0)


@pytest.mark.parametrize(
    ("tool", "body", "result", "shown"),
    [
        (Recorder(), call("add", a=1), "error", "Error: KeyError: 'b'"),
        (Recorder(sleep_s=60), call("add"), "timeout", "Error: add did not answer within 0.05 s"),
        (Recorder(broken_create=True), call("add"), "error", "Error: RuntimeError: no sandbox"),
        (Recorder(answer=None), call("add"), "error", "Error: add gave no readable answer"),
        (Recorder(answer=("5", float("nan"), {})), call("add"), "error", "Error: a tool gave the number nan"),
        (Recorder(answer=("5", 1e300, {})), call("add"), "error", "Error: a tool gave the number 1e+300"),
        (Recorder(), call("sub"), "unknown", "Error: there is no tool 'sub'; tools: add"),
        (Recorder(), "{", "malformed", "Error: the tool call could not be read"),
    ],
    ids=["raises", "timeout", "create", "no text", "nan", "huge", "unknown", "malformed"],
)
async def test_errors_are_shown_to_the_model_and_counted(
    tokenization: Tokenization, tool: Recorder, body: str, result: str, shown: str
) -> None:
    engine = ScriptedEngine([called(body), ANSWER])
    timeout_s = 0.05 if result == "timeout" else 60
    context = make_context(engine, tokenization, tools=[tool], tool_timeout_s=timeout_s)
    episode = await tool_agent(context)
    assert shown in inserted_text(context, episode)
    assert episode.finish_reason == "stop"
    label = "add" if result in ("error", "timeout") else "none"
    assert counted(context, label, result) == 1
    assert tool.names.count("create") == tool.names.count("release")


async def test_a_tool_that_cancels_itself_is_an_error_like_others(tokenization: Tokenization) -> None:
    class Cancelled(Recorder):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            raise asyncio.CancelledError

    context = make_context(ScriptedEngine([called(call("add")), ANSWER]), tokenization, tools=[Cancelled()])
    assert "Error: add was cancelled from within" in inserted_text(context, await tool_agent(context))


async def test_calls_past_the_limit_are_refused(tokenization: Tokenization) -> None:
    tool = Recorder()
    one = called(call("add", a=1, b=1))[:-1]
    context = make_context(
        ScriptedEngine([(*one, *one, *one, END), ANSWER]), tokenization, tools=[tool], max_calls_per_turn=2
    )
    text = inserted_text(context, await tool_agent(context))
    assert (text.count("[2]"), text.count("[Error: at most 2 calls are run per turn]")) == (2, 1)
    assert tool.names.count("execute") == 2


@pytest.mark.parametrize(
    ("keep", "shown"),
    [("head", "[abcd...(truncated)]"), ("tail", "[(truncated)...wxyz]"), ("both", "[ab...(truncated)...yz]")],
)
async def test_a_long_answer_is_cut(tokenization: Tokenization, keep: str, shown: str) -> None:
    tool = Recorder(answer="abcdefghijklmnopqrstuvwxyz")
    context = make_context(
        ScriptedEngine([called(call("add")), ANSWER]), tokenization, tools=[tool],
        max_tool_response_chars=4, tool_response_keep=keep,
    )  # fmt: skip
    assert shown in inserted_text(context, await tool_agent(context))


async def test_the_last_turn_calls_no_tools(tokenization: Tokenization) -> None:
    tool = Recorder()
    turn = called(call("add", a=1, b=1))
    engine = ScriptedEngine([turn] * 9)
    episode = await tool_agent(make_context(engine, tokenization, tools=[tool], max_turns=3))
    assert (len(engine.requests), tool.names.count("execute"), episode.finish_reason) == (3, 2, "length")
    assert episode.turn_rewards == (0.5, 0.5, 0.0)
    assert tuple(episode.token_ids[episode.last_turn_start :].tolist()) == turn


async def test_a_limit_on_replies_ends_the_sample_after_the_next_turn(tokenization: Tokenization) -> None:
    tool = Recorder()
    engine = ScriptedEngine([called(call("add", a=1, b=1))] * 9)
    episode = await tool_agent(make_context(engine, tokenization, tools=[tool], max_user_turns=2))
    assert (len(engine.requests), tool.names.count("execute"), episode.finish_reason) == (3, 2, "length")
    assert episode.info_for_rewards == {"num_turns": 6, "tool_rewards": [0.5, 0.5], "turn_scores": []}


async def test_a_tool_may_have_its_own_deadline(tokenization: Tokenization) -> None:
    tools = [Recorder("slow", sleep_s=0.2), Recorder("hung", sleep_s=60)]
    turn = (*called(call("slow", a=1, b=1))[:-1], *called(call("hung")))
    context = make_context(
        ScriptedEngine([turn, ANSWER]), tokenization, tools=tools, tool_timeout_s=60, tool_timeouts_s={"hung": 0.05},
    )  # fmt: skip
    text = inserted_text(context, await tool_agent(context))
    assert "[2]" in text and "hung did not answer within 0.05 s" in text


async def test_an_answer_without_room_ends_the_sample(tokenization: Tokenization) -> None:
    turn = called(call("add", a=1, b=1))
    engine = ScriptedEngine([turn, ANSWER])
    episode = await tool_agent(make_context(engine, tokenization, tools=[Recorder()], max_tokens=len(turn) + 5))
    assert (len(engine.requests), episode.finish_reason) == (1, "length")
    assert tuple(episode.token_ids.tolist()) == turn
    assert episode.loss_mask.all()


async def test_a_turn_that_was_cut_calls_no_tools(tokenization: Tokenization) -> None:
    tool = Recorder()
    turn = called(call("add", a=1, b=1))
    episode = await tool_agent(
        make_context(ScriptedEngine([turn]), tokenization, tools=[tool], max_tokens=len(turn) - 1)
    )
    assert (episode.finish_reason, tool.names) == ("length", [])


async def test_arguments_of_the_prompt_reach_the_tool(tokenization: Tokenization) -> None:
    tool = Recorder(answer="5")
    kwargs = {"add": {f"{name}_kwargs": {"of": name} for name in ("create", "execute", "calc_reward", "release")}}
    context = make_context(
        ScriptedEngine([called(call("add")), ANSWER]), tokenization, tools=[tool], extra_info={"tools_kwargs": kwargs}
    )
    await tool_agent(context)
    assert [(event[0], event[-1]) for event in tool.events] == [
        (name, {"of": name}) for name in ("create", "execute", "calc_reward", "release")
    ]


@pytest.mark.parametrize("kwargs", ["add", {"add": 3}, {"add": {"create_kwargs": 3}}])
async def test_tools_kwargs_of_another_shape_are_refused(tokenization: Tokenization, kwargs: Any) -> None:
    context = make_context(
        ScriptedEngine([ANSWER]), tokenization, tools=[Recorder()], extra_info={"tools_kwargs": kwargs}
    )
    with pytest.raises(InvalidInput, match="tools_kwargs"):
        await tool_agent(context)


async def test_an_agent_without_tools_says_what_to_set(tokenization: Tokenization) -> None:
    with pytest.raises(InvalidInput, match="tools_file"):
        await tool_agent(make_context(ScriptedEngine([ANSWER]), tokenization))


async def test_cancelling_ends_the_tool_and_releases_it(tokenization: Tokenization) -> None:
    tool = Recorder(sleep_s=60)
    task = asyncio.create_task(
        tool_agent(make_context(ScriptedEngine([called(call("add"))]), tokenization, tools=[tool]))
    )
    while not tool.num_running:
        await asyncio.sleep(0.001)
    await end_task(task)
    assert tool.num_running == 0
    assert tool.names == ["create", "execute", "release"]


async def test_cancelling_ends_the_request_that_runs(tokenization: Tokenization) -> None:
    engine = ScriptedEngine([called(call("add", a=1, b=1)), ANSWER], hold=lambda request: asyncio.Event()
                            if request.request_id.endswith(".1") else None)  # fmt: skip
    tool = Recorder()
    task = asyncio.create_task(tool_agent(make_context(engine, tokenization, tools=[tool])))
    while not any(request_id.endswith(".1") for request_id in engine.running):
        await asyncio.sleep(0.001)
    await end_task(task)
    assert engine.running == set()
    assert tool.names[-1] == "release"


async def test_an_aborted_turn_ends_the_sample_without_a_reward(tokenization: Tokenization) -> None:
    class Aborting(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            if False:
                yield None

    tool = Recorder()
    episode = await tool_agent(make_context(Aborting([]), tokenization, tools=[tool]))
    assert (episode.finish_reason, tool.names, len(episode.token_ids)) == ("aborted", [], 0)
