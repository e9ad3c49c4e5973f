"""A graph of OpenAI's Agents SDK as a worker: a triage agent hands a question over to a calculating agent with a tool.

python examples/openai_agents/worker.py --run-dir runs/my-run --submit 8
"""

from __future__ import annotations

import asyncio
import sys

import openai

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from penstock.client import Attempt
from penstock.client.worker import run_worker, worker_parser

QUESTIONS = [{"question": f"What is {first} + 4?", "answer": str(first + 4)} for first in range(2, 6)]
MAX_TURNS = 8


@function_tool
def add(first: int, second: int) -> str:
    """Add two numbers."""
    return str(first + second)


async def attempt(task: Attempt) -> float:
    """The reward is 1 if the last answer has the number. A model that calls what is not there or never ends gets 0."""
    async with openai.AsyncOpenAI(
        base_url=task.base_url, api_key=task.api_key or "none", default_headers=task.headers
    ) as client:
        model = OpenAIChatCompletionsModel(model=task.model, openai_client=client)
        calculator = Agent(name="calculator", instructions="Answer with the tool add.", model=model, tools=[add])
        triage = Agent(name="triage", instructions="Hand over.", model=model, handoffs=[calculator])
        try:
            result = await Runner.run(triage, task.payload["question"], max_turns=MAX_TURNS)
        except (MaxTurnsExceeded, ModelBehaviorError):
            return 0.0
    return float(task.payload["answer"] in str(result.final_output))


def main() -> int:
    set_tracing_disabled(disabled=True)  # traces would be sent to OpenAI
    asyncio.run(run_worker(worker_parser(__doc__).parse_args(), attempt, QUESTIONS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
