"""Interactions: replies, rewards of turns, and how they combine with the reward function's score."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cancellation import end_task
from penstock.errors import DeadlineExceeded, InvalidInput, PenstockError
from penstock.trajectory import TokenReward, VersionSegment
from penstock_rollout.agents.episode import Episode, combine_rewards, token_rewards_of
from penstock_rollout.agents.interactions import Interaction, InteractionAnswer
from penstock_rollout.agents.loops import interaction_agent, tool_agent
from penstock_rollout.agents.tools import Tool
from penstock_rollout.tokenization import Tokenization
from support.scripted_engines import (
    END,
    ScriptedEngine,
    called,
    function_schema,
    make_context,
    make_tokenizer_folder,
    spelled,
)


class Teacher(Interaction):
    """Accepts one answer as right. Every other answer costs 0.1."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.events: list[Any] = []

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.events.append(("start", instance_id, kwargs))

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> InteractionAnswer:
        self.events.append([dict(message) for message in messages])
        if "broken" in self.config:
            raise RuntimeError("nobody at home")
        if "sleep_s" in self.config:
            await asyncio.sleep(self.config["sleep_s"])
        is_right = messages[-1]["content"] == kwargs["wanted"]
        return is_right, "again", self.config.get("reward", 1.0 if is_right else -0.1), {"asked": 1, "note": "text"}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        final: float | None = self.config.get("final")
        return final

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.events.append("finalize")


def words(text: str) -> tuple[int, ...]:
    return (*spelled(text), END)


WANTED = {"interaction_kwargs": {"name": "teacher", "wanted": "ok"}}


@pytest.fixture(scope="module")
def tokenization(tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    folder: Path = tmp_path_factory.mktemp("model")
    return Tokenization(make_tokenizer_folder(folder))


async def test_the_model_tries_until_the_interaction_is_done(tokenization: Tokenization) -> None:
    teacher = Teacher({"final": 0.25})
    engine = ScriptedEngine([words("no"), words("ok")])
    context = make_context(engine, tokenization, interactions={"teacher": teacher}, extra_info=WANTED)
    episode = await interaction_agent(context)
    assert (episode.finish_reason, episode.turn_rewards, episode.final_reward) == ("stop", (-0.1, 1.0), 0.25)
    assert episode.reward_parts == {"asked": 2}
    last_of_first = int(np.flatnonzero(episode.loss_mask == 0)[0]) - 1
    placed = token_rewards_of(episode, "sum")
    assert placed == (TokenReward(last_of_first, -0.1), TokenReward(len(episode.token_ids) - 1, 1.0))
    assert token_rewards_of(episode, "last") == ()
    assert teacher.events[0] == ("start", "7.1.0", {"wanted": "ok"})
    assert teacher.events[2] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "ok"},
    ]
    assert teacher.events[-1] == "finalize"
    inserted = episode.token_ids[episode.loss_mask == 0].tolist()
    assert tokenization.raw_text(inserted) == "\n<|start|>user\nagain<|end|>\n<|start|>assistant\n"


async def test_the_last_turn_is_scored_too(tokenization: Tokenization) -> None:
    context = make_context(
        ScriptedEngine([words("no"), words("no")]), tokenization, interactions={"teacher": Teacher({})},
        extra_info=WANTED, max_turns=2,
    )  # fmt: skip
    episode = await interaction_agent(context)
    assert (episode.finish_reason, episode.turn_rewards) == ("length", (-0.1, -0.1))


async def test_a_cut_answer_is_scored_and_stays_cut(tokenization: Tokenization) -> None:
    context = make_context(
        ScriptedEngine([spelled("okay")]), tokenization, interactions={"teacher": Teacher({})},
        extra_info=WANTED, max_tokens=2,
    )  # fmt: skip
    episode = await interaction_agent(context)
    assert (episode.finish_reason, episode.turn_rewards) == ("length", (1.0,))


async def test_tools_and_an_interaction_together(tokenization: Tokenization) -> None:
    class Clock(Tool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
            return "12"

    teacher = Teacher({})
    engine = ScriptedEngine([called('{"name": "clock"}'), words("no"), words("ok")])
    context = make_context(
        engine, tokenization, tools=[Clock({}, function_schema("clock"))], interactions={"teacher": teacher},
        extra_info=WANTED,
    )  # fmt: skip
    episode = await tool_agent(context)
    assert episode.turn_rewards == (0.0, -0.1, 1.0)
    assert [message["role"] for message in teacher.events[1]] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("config", "error", "why"),
    [
        ({"broken": True}, PenstockError, "teacher: generate_response failed: RuntimeError"),
        ({"sleep_s": 60}, DeadlineExceeded, "took more than 0.05 s"),
        ({"reward": float("nan")}, PenstockError, "nan is not a reward"),
        ({"reward": 1e300}, PenstockError, r"1e\+300 is not a reward"),
    ],
)
async def test_an_interaction_that_fails_fails_the_sample(
    tokenization: Tokenization, config: dict[str, Any], error: type[Exception], why: str
) -> None:
    teacher = Teacher(config)
    context = make_context(
        ScriptedEngine([words("no")]), tokenization, interactions={"teacher": teacher}, extra_info=WANTED,
        tool_timeout_s=0.05 if error is DeadlineExceeded else 60,
    )  # fmt: skip
    with pytest.raises(error, match=why):
        await interaction_agent(context)
    assert teacher.events[-1] == "finalize"


async def test_cancelling_finalizes(tokenization: Tokenization) -> None:
    teacher = Teacher({"sleep_s": 60})
    context = make_context(
        ScriptedEngine([words("no")]), tokenization, interactions={"teacher": teacher}, extra_info=WANTED
    )
    task = asyncio.create_task(interaction_agent(context))
    while len(teacher.events) < 2:
        await asyncio.sleep(0.001)
    await end_task(task)
    assert teacher.events[-1] == "finalize"


@pytest.mark.parametrize(
    ("declared", "kwargs", "why"),
    [
        ({}, {"name": "teacher"}, "interactions_file"),
        ({"teacher": Teacher({})}, {"name": "tutor"}, "no interaction 'tutor'; declared: teacher"),
        ({"teacher": Teacher({}), "tutor": Teacher({})}, None, "say which interaction: teacher, tutor"),
        ({"teacher": Teacher({})}, "teacher", "must be an object"),
    ],
)
async def test_a_wrong_choice_says_what_there_is(
    tokenization: Tokenization, declared: dict[str, Interaction], kwargs: Any, why: str
) -> None:
    context = make_context(
        ScriptedEngine([words("no")]), tokenization, interactions=declared, extra_info={"interaction_kwargs": kwargs}
    )
    with pytest.raises(InvalidInput, match=why):
        await interaction_agent(context)


def episode_of(turn_rewards: tuple[float, ...], final_reward: float | None) -> Episode:
    return Episode(
        np.zeros(1, np.int32), np.ones(1, np.uint8), np.zeros(1, np.float32), (VersionSegment(0, 1, 0),), "stop",
        turn_rewards=turn_rewards, final_reward=final_reward, reward_parts={"asked": 2.0},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "final", "reward"),
    [("sum", 0.5, 12.25), ("sum", None, 11.75), ("replace", 0.5, 2.25), ("last", 0.5, 0.5), ("last", None, 2.0)],
)
def test_how_rewards_combine(how: Any, final: float | None, reward: float) -> None:
    combined, parts = combine_rewards((10.0, {"format": 1.0}), episode_of((-0.25, 2.0), final), how)
    assert combined == reward
    expected = {"score": 10.0, "format": 1.0, "turn_1": -0.25, "turn_2": 2.0, "asked": 2.0}
    assert parts == expected | ({} if final is None else {"final": final})


def test_rewards_of_tokens_are_summed_and_stay_at_their_token() -> None:
    episode = replace(
        episode_of((1.0,), None), token_ids=np.zeros(3, np.int32), loss_mask=np.ones(3, np.uint8),
        token_rewards={0: 0.5, 2: 0.25},
    )  # fmt: skip
    assert combine_rewards((10.0, {}), episode, "sum")[0] == 11.75
    assert token_rewards_of(episode, "replace") == (TokenReward(0, 0.5), TokenReward(2, 1.25))


@pytest.mark.parametrize("how", ["sum", "replace", "last"])
def test_an_agent_without_rewards_leaves_the_functions(how: Any) -> None:
    assert combine_rewards((10.0, {}), episode_of((), None), how)[0] == 10.0
