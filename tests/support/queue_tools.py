"""`penstock queue` for tests, and groups that use every field. Import the fixtures `tools` and `recording`."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import redis

from penstock.cli import main as cli
from penstock.codec import decode_group, encode_group, encode_prompt
from penstock.config.service import RedisConfig, ReplayConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import QueueStat
from penstock.store.redis_client import connect
from penstock.trajectory import Group, Prompt, Sampling, SamplingSegment, TokenReward, Trajectory, VersionSegment
from support.redis_server import RedisProcess

USERS = Path(__file__).parents[2] / "deploy" / "redis" / "users.acl"
LOOSE = ReplayConfig(groups_per_step=64, max_staleness=1000, max_attempts=1, lease_ttl_s=600)
T = TypeVar("T")


class Tools:
    """Runs `penstock queue` against one Redis as its operator, and gives access to the queue to check the result."""

    def __init__(self, url: str, operator_url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self.operator_url = operator_url
        self.capsys = capsys
        self.run = f"tools-{uuid.uuid4().hex[:12]}"

    @classmethod
    def of_operator(cls, server: RedisProcess, capsys: pytest.CaptureFixture[str]) -> Tools:
        """The operator has exactly the rights of deploy/redis/users.acl."""
        [rights] = [line for line in USERS.read_text().splitlines() if line.startswith("user operator ")]
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("ACL", "SETUSER", *rights.split()[1:], ">secret")
        return cls(server.url, f"redis://operator:secret@127.0.0.1:{server.port}/0", capsys)

    def __call__(self, *words: str, run: str = "", code: int = 0) -> str:
        """Run the command. Returns its standard output, or its one line of standard error if it should fail."""
        assert cli.main(["queue", *words, "--redis-url", self.operator_url, "--run", run or self.run]) == code
        captured = self.capsys.readouterr()
        if code:
            assert captured.err.count("\n") == 1, captured.err
        return captured.err if code else captured.out

    def json(self, *words: str, run: str = "") -> Any:
        return json.loads(self(*words, "--json", run=run))

    def on(self, use: Callable[[RedisReplayQueue], Awaitable[T]], replay: ReplayConfig = LOOSE, run: str = "") -> T:
        async def connected() -> T:
            client = connect(RedisConfig(url=self.url))
            try:
                return await use(RedisReplayQueue(client, run or self.run, replay))
            finally:
                await client.aclose()

        return asyncio.run(connected())

    def fill(self, groups: Sequence[Group], prompt: Prompt | None = None) -> None:
        """Submit a prompt for each group and append the group, as a rollout server would."""

        async def fill(queue: RedisReplayQueue) -> None:
            payload = encode_prompt(prompt or Prompt(token_ids=(1, 2)))
            await queue.submit([payload] * len(groups), [0] * len(groups), "")
            for lease, group in zip(await queue.lease("rollout-0", len(groups)), groups, strict=True):
                identified = replace(group, run=self.run, prompt_id=lease.prompt_id, attempt=lease.attempt)
                assert await queue.append(lease, encode_group(identified), group.min_version) == "accepted"

        self.on(fill)

    def deliver(self, num_groups: int) -> list[int]:
        async def take(queue: RedisReplayQueue) -> list[int]:
            await queue.take_term(0)
            return await queue.take(1, num_groups)

        return self.on(take)

    def dead_letter(self, prompts: Sequence[bytes], reason: str) -> None:
        async def dead_letter(queue: RedisReplayQueue) -> None:
            await queue.submit(prompts, [0] * len(prompts), "")
            for lease in await queue.lease("rollout-0", len(prompts)):
                await queue.give_back("rollout-0", lease, failure=reason, is_final=True)

        self.on(dead_letter)

    def stat(self, run: str = "") -> QueueStat:
        stat = self.on(lambda queue: queue.stat(), run=run)
        assert stat.conservation_error == 0, stat
        return stat

    def taken(self, run: str, num_groups: int) -> list[Group]:
        """The groups that a learner of `run` gets, in order."""

        async def take(queue: RedisReplayQueue) -> list[Group]:
            await queue.take_term(0)
            await queue.rewind_step(0, 0)
            ids = await queue.take(1, num_groups)
            return [decode_group(delivery.payload) for delivery in await queue.fetch(ids)]

        return self.on(take, run=run)


@pytest.fixture(name="tools")
def operator_tools(redis_process: RedisProcess, capsys: pytest.CaptureFixture[str]) -> Tools:
    return Tools.of_operator(redis_process, capsys)


@pytest.fixture(name="recording")
def recording_file(tmp_path: Path) -> Path:
    return tmp_path / "groups.parquet"


def rich_group(index: int) -> Group:
    """A group that uses every field."""
    random = np.random.default_rng(index)
    trajectories = []
    for sample in range(int(random.integers(1, 5))):
        length = int(random.integers(2, 40))
        calls = (SamplingSegment(0, 1, 0.5, 1.0), SamplingSegment(1, length, 0.25, 0.5, 8, 0.125))
        trajectories.append(
            Trajectory(
                token_ids=random.integers(-(2**31), 2**31, length).astype(np.int32),
                loss_mask=random.integers(0, 2, length).astype(np.uint8),
                log_probs=-random.exponential(1.0, length).astype(np.float32),
                segments=(VersionSegment(0, 1, 7), VersionSegment(1, length, 2**40)),
                reward=float(random.normal()),
                finish_reason=("stop", "length", "aborted")[sample % 3],  # type: ignore[arg-type]
                reward_parts={f"Teil {part} µ": float(random.normal()) for part in range(sample)},
                is_baseline=sample == 2,
                sampling_segments=calls if sample % 2 else (),
                episode=sample,
                reward_failed=sample == 1,
                token_rewards=(TokenReward(0, 0.5), TokenReward(length - 1, -0.25)) if sample % 2 else (),
                server_ids=("rollout-8", "rollout-9") if sample == 3 else (),
            )
        )
    return Group(
        run="recorded",
        prompt_id=1,
        attempt=1,
        server_id=f"rollout-{index}",
        data_source="gsm8k" if index % 2 else "",
        sampling=Sampling(
            temperature=0.7,
            top_p=0.9,
            top_k=index % 3,
            min_p=0.1,
            max_tokens=64,
            ignore_eos=index % 2 == 0,
            stop=("Ende µ", "\n\n")[: index % 3],
            seed=index if index % 2 else None,
        ),  # fmt: skip
        prompt_token_ids=random.integers(0, 1000, 1 + index % 3).astype(np.int32),
        trajectories=tuple(trajectories),
        agent_name="tool_agent",
        finished_at_ms=1_700_000_000_000 + index,
    )


def content(group: Group) -> list[Any]:
    """Everything but the identity, which an import assigns again. Comparable with ==, including the types of arrays."""
    arrays = [
        (array.dtype.str, array.tolist())
        for t in group.trajectories
        for array in (t.token_ids, t.loss_mask, t.log_probs)
    ]
    others = [
        {name: value for name, value in vars(t).items() if not isinstance(value, np.ndarray)}
        for t in group.trajectories
    ]
    return [
        group.server_id, group.data_source, group.agent_name, group.sampling, group.finished_at_ms,
        group.prompt_token_ids.dtype.str, group.prompt_token_ids.tolist(), arrays, others,
    ]  # fmt: skip
