"""Environments with Gymnasium's interface and step servers as workers: examples/step_environment."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from penstock.client import PenstockClient, work
from penstock.codec import decode_group
from penstock.replay.queue import RedisReplayQueue
from penstock.trajectory import VersionSegment
from penstock_rollout.engines.engine import GenerateRequest, TokenChunk
from support.gateways import Gateway
from support.scripted_engines import END, spelled

FOLDER = Path(__file__).parents[3] / "examples" / "step_environment"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"step_environment_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def step_server() -> Iterator[str]:
    """A step server around `Guess`, with an episode for each client."""
    guess, episodes = load("guess"), {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/reset":
                episodes[self.headers["X-Episode"]] = environment = guess.Guess()
                answer = {"observation": environment.reset(seed=fields["seed"])[0], "reward": None, "done": False}
            else:
                observed, reward, ended, cut, _ = episodes[self.headers["X-Episode"]].step(fields["action"])
                answer = {"observation": observed, "reward": reward, "done": ended or cut}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def count_up(request: GenerateRequest) -> AsyncIterator[TokenChunk]:
    """Guess 5, 6, 7 and so on."""
    ids = (*spelled(str(5 + (list(request.prompt_token_ids).count(END) - 1) // 2)), END)
    yield TokenChunk(ids, (-0.5,) * len(ids), (VersionSegment(0, len(ids), 3),), "stop")


@pytest.mark.parametrize("is_remote", [False, True], ids=["in the worker", "behind a step server"])
async def test_an_episode_is_a_session_with_the_sum_of_its_rewards(
    is_remote: bool, step_server: str, talking: tuple[Gateway, dict[str, Any]], queue: RedisReplayQueue
) -> None:
    gateway, engines = talking
    for engine in engines.values():
        engine.generate = count_up
    worker, guess = load("worker"), load("guess")
    player = worker.Player(worker.maker_of(step_server if is_remote else f"{FOLDER / 'guess.py'}:Guess"), max_turns=9)
    async with PenstockClient(gateway.url, api_key=gateway.key) as client, asyncio.timeout(120):
        task_ids = await client.submit_tasks([0, 1], num_sessions=2)
        done = await work(client, player, at_once=4, idle_s=0.2)
        assert (done.rewarded, done.failed) == (4, 0)
        tasks = [await client.get_task(task_id) for task_id in task_ids]
    for task in tasks:
        environment = guess.Guess()
        environment.reset(seed=task.payload)
        wanted = float(5 <= environment.number <= 8)
        turns = environment.number - 4 if wanted else 4
        group = decode_group(await queue.get_group(task.prompt_ids[0]))
        assert [trajectory.reward for trajectory in group.trajectories] == [wanted, wanted]
        sampled = tuple(token for turn in range(turns) for token in (*spelled(str(5 + turn)), END))
        for trajectory in group.trajectories:
            assert tuple(trajectory.token_ids[trajectory.loss_mask.astype(bool)]) == sampled
