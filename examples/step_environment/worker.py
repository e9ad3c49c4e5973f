"""Environments with Gymnasium's interface, or behind a step server, as a worker.

python examples/step_environment/worker.py examples/step_environment/guess.py:Guess --run-dir runs/my-run --submit 8
python examples/step_environment/worker.py http://127.0.0.1:8000 --run-dir runs/my-run
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any

import httpx
import openai

from penstock.client import Attempt
from penstock.client.worker import run_worker, worker_parser
from penstock.user_code import load_object

STEP_S = 60.0
Step = tuple[str, float, bool, bool, dict[str, Any]]


class RemoteEnvironment:
    """An environment behind HTTP: `POST /reset` takes a seed, `POST /step` an action; both answer with an observation,
    and `/step` with reward and done. The server must tell its clients apart by `X-Episode`, or serve one at a time."""

    def __init__(self, url: str, episode: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=STEP_S, headers={"X-Episode": episode})

    async def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        fields = await self._post("/reset", {"seed": seed})
        return str(fields["observation"]), fields

    async def step(self, action: str) -> Step:
        fields = await self._post("/step", {"action": action})
        return str(fields["observation"]), float(fields["reward"] or 0), bool(fields["done"]), False, fields

    async def close(self) -> None:
        await self.http.aclose()

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.http.post(path, json=body)
        answer.raise_for_status()
        fields: dict[str, Any] = answer.json()
        return fields


class Player:
    """Plays an environment with the model: observations are its questions, and its answers are the actions."""

    def __init__(self, make_environment: Callable[[Attempt], Any], max_turns: int) -> None:
        self.make_environment = make_environment
        self.max_turns = max_turns

    async def __call__(self, attempt: Attempt) -> float:
        """Returns the sum of the rewards."""
        environment = self.make_environment(attempt)
        try:
            async with openai.AsyncOpenAI(
                base_url=attempt.base_url, api_key=attempt.api_key or "none", default_headers=attempt.headers
            ) as model:
                return await self._play(environment, model, attempt)
        finally:
            if hasattr(environment, "close"):
                await _result(environment.close())

    async def _play(self, environment: Any, model: openai.AsyncOpenAI, attempt: Attempt) -> float:
        observation, _ = await _result(environment.reset(seed=attempt.payload))
        messages: list[Any] = []
        total = 0.0
        for _ in range(self.max_turns):
            messages.append({"role": "user", "content": observation})
            answer = await model.chat.completions.create(model=attempt.model, messages=messages)
            action = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": action})
            observation, reward, terminated, truncated, _ = await _result(environment.step(action))
            total += reward
            if terminated or truncated:
                break
        return total


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def maker_of(place: str) -> Callable[[Attempt], Any]:
    """Makes an environment for each attempt, from the URL of a step server or from `file.py:Class`."""
    if place.startswith(("http://", "https://")):
        return lambda attempt: RemoteEnvironment(place, attempt.task.session_id)
    environment_class = load_object(place, "the environment")
    return lambda attempt: environment_class()


def main() -> int:
    parser = worker_parser(__doc__)
    parser.add_argument("environment", help="file.py:Class with Gymnasium's interface, or the URL of a step server")
    parser.add_argument("--num-seeds", type=int, default=64, help="tasks to submit, one for each seed (64)")
    parser.add_argument("--max-turns", type=int, default=32, help="longest episode (32)")
    options = parser.parse_args()
    player = Player(maker_of(options.environment), options.max_turns)
    asyncio.run(run_worker(options, player, range(options.num_seeds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
