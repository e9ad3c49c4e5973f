"""The built-in agent loops: one response, or a conversation in which the model calls tools, an interaction replies to
it, or both.

| the model's turn           | what happens                                      | finish reason, if the sample ends |
|----------------------------|---------------------------------------------------|-----------------------------------|
| calls tools                | all calls run at once, their results are inserted | `length`, at the last turn        |
| no call, no interaction    | the sample ends                                   | that of the turn                  |
| no call, an interaction    | it scores the turn, and its reply is inserted     | that of the turn, when it is done |
| the reply does not fit     | nothing is inserted, the sample ends              | `length`                          |

Tool calls in a turn that a token limit cut are ignored, because the last one may be incomplete.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from penstock.errors import InvalidInput
from penstock.trajectory import FinishReason
from penstock_rollout.agents.context import AgentContext, uses_tools
from penstock_rollout.agents.episode import Episode
from penstock_rollout.agents.interactions import InteractionSession
from penstock_rollout.agents.tool_calls import MalformedCall, ToolCall
from penstock_rollout.agents.tool_session import AgentData, ToolSession
from penstock_rollout.agents.tools import tools_kwargs
from penstock_rollout.agents.transcript import Transcript, Turn


@uses_tools
async def tool_agent(context: AgentContext) -> Episode:
    """Offer the tools to the model. With `interaction_kwargs` in the prompt, an interaction replies to other turns."""
    if not context.toolbox.tools:
        raise InvalidInput(
            "agent_name", "tool_agent has no tools to offer; set rollout.agents.tools, mcp_servers or tools_file"
        )
    return await _Conversation(context, _interaction_kwargs(context)).run()


async def interaction_agent(context: AgentContext) -> Episode:
    """Offer no tools. The interaction that `interaction_kwargs` names replies to every turn."""
    return await _Conversation(context, _interaction_kwargs(context) or {}).run()


class _Conversation:
    """One sample. Tools and interactions read `data`; the sample's tokens come only from the transcript."""

    def __init__(self, context: AgentContext, interaction_kwargs: dict[str, Any] | None) -> None:
        self.context = context
        self.transcript = Transcript(context)
        self.data = AgentData(
            request_id=context.request_id,
            messages=[*context.prompt.chat],
            tools_kwargs=tools_kwargs(context.prompt.extra_info),
            interaction_kwargs=interaction_kwargs or {},
        )
        self.tools = ToolSession(context, self.data)
        self.interaction = (
            None
            if interaction_kwargs is None
            else InteractionSession(
                context.interactions, context.request_id, interaction_kwargs, context.config.tool_timeout_s
            )
        )
        self.turn_rewards: list[float] = []
        self.numbers: dict[str, float] = {}

    async def run(self) -> Episode:
        async with self.tools, self.interaction or nullcontext():
            finish_reason = await self._turns()
            final_reward = None if finish_reason == "aborted" else await self._final_reward()
        return self.transcript.episode(
            finish_reason,
            turn_rewards=self.turn_rewards,
            final_reward=final_reward,
            reward_parts=self.numbers,
            tool_rewards=self.data.tool_rewards,
            turn_scores=self.data.turn_scores,
        )

    async def _turns(self) -> FinishReason:
        while True:
            turn = await self.transcript.sample_turn()
            if turn.finish_reason == "aborted":
                return "aborted"
            self.data.assistant_turns += 1
            most_replies = self.context.config.max_user_turns
            is_answered_enough = most_replies is not None and self.data.user_turns >= most_replies
            is_last = is_answered_enough or self.transcript.num_turns >= self.context.config.max_turns
            answer = await self._answer(turn, is_last)
            if answer is None:
                return turn.finish_reason
            if is_last or not self.transcript.insert(answer):
                return "length"
            self.data.messages += answer
            self.data.user_turns += 1

    async def _answer(self, turn: Turn, is_last: bool) -> list[dict[str, Any]] | None:
        """The messages that reply to a turn, or None to end the sample. Appends the reward of the turn."""
        tokenization = self.context.tokenization
        self.data.messages.append({"role": "assistant", "content": tokenization.text(turn.token_ids)})
        calls: list[ToolCall | MalformedCall] = []
        if self.context.toolbox.tools and turn.finish_reason == "stop":
            calls = self.context.parse_calls(tokenization.raw_text(turn.token_ids))
        if calls:
            return await self._tool_messages([] if is_last else calls)
        if self.interaction is None:
            self.turn_rewards.append(0.0)
            return None
        done, feedback, reward, numbers = await self.interaction.respond(self.data.messages)
        self.turn_rewards.append(reward)
        self.data.turn_scores.append(reward)
        self._record(numbers)
        return None if done else [{"role": "user", "content": feedback}]

    async def _tool_messages(self, calls: list[ToolCall | MalformedCall]) -> list[dict[str, Any]]:
        outcomes = await self.tools.run(calls)
        self.turn_rewards.append(sum(outcome.reward for outcome in outcomes))
        self.data.tool_rewards += [outcome.reward for outcome in outcomes]
        for outcome in outcomes:
            self._record(outcome.numbers)
        turn = self.transcript.num_turns - 1
        return [
            {"role": "tool", "name": outcome.name, "tool_call_id": f"call_{turn}_{index}", "content": outcome.text}
            for index, outcome in enumerate(outcomes)
        ]

    async def _final_reward(self) -> float | None:
        given = [await self.tools.final_reward(), await self.interaction.final_reward() if self.interaction else None]
        rewards = [reward for reward in given if reward is not None]
        return sum(rewards) if rewards else None

    def _record(self, numbers: dict[str, float]) -> None:
        """Sum the numbers of each name over the turns."""
        for name, value in numbers.items():
            self.numbers[name] = self.numbers.get(name, 0.0) + value


def _interaction_kwargs(context: AgentContext) -> dict[str, Any] | None:
    """The prompt's `interaction_kwargs`, or None. Parquet writes null for rows without the field."""
    kwargs = context.prompt.extra_info.get("interaction_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InvalidInput("extra_info.interaction_kwargs", "must be an object with the interaction's `name`")
    return kwargs


async def single_turn_agent(context: AgentContext) -> Episode:
    """Generate one response, or continue the one that another server began. The model samples every token, so all of
    them are trained."""
    transcript = Transcript(context)
    transcript.continue_saved()
    turn = await transcript.sample_turn()
    return transcript.episode(turn.finish_reason)
