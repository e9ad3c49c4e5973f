"""Multi-turn agents turn a prompt into a group, through the real producer and an in-memory queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.cancellation import end_task
from penstock.codec import decode_group, encode_prompt
from penstock.config.rollout import AgentsConfig, RewardConfig, RolloutConfig
from penstock.config.service import ReplayConfig
from penstock.trajectory import Group, Prompt, Sampling
from penstock_rollout.agents.episode import Episode
from penstock_rollout.agents.loops import Agents
from penstock_rollout.agents.transcript import AgentContext, Transcript
from penstock_rollout.engines.engine import EngineStats
from penstock_rollout.groups.producer import GroupMaker, Producer
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.tokenization import Tokenization
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore
from support.scripted_engines import END, ScriptedEngine, called, make_tokenizer_folder, spelled

REPLAY = ReplayConfig(groups_per_step=64, max_attempts=1)
TOOLS = """
tools:
  - class_name: {folder}/parrot.py:Parrot
    tool_schema: {{function: {{name: parrot}}}}
"""
PARROT = """
from penstock_rollout.agents.tools import Tool

class Parrot(Tool):
    async def execute(self, instance_id, parameters, **kwargs):
        return "ok", 0.5, {}
"""
CALL = called('{"name": "parrot"}')
ANSWER = (*spelled("no"), END)


async def think_twice(context: AgentContext) -> Episode:
    """The example of docs/agents.md."""
    transcript = Transcript(context)
    turn = await transcript.sample_turn()
    if turn.finish_reason == "stop" and transcript.insert([{"role": "user", "content": "Are you sure?"}]):
        turn = await transcript.sample_turn()
    return transcript.episode(turn.finish_reason)


async def returns_nothing(context: AgentContext) -> None:
    return None


async def cancels_itself(context: AgentContext) -> None:
    raise asyncio.CancelledError


@pytest.fixture
def tokenization(tmp_path: Path) -> Tokenization:
    return Tokenization(make_tokenizer_folder(tmp_path / "model"))


@pytest.fixture
def tools_file(tmp_path: Path) -> Path:
    (tmp_path / "parrot.py").write_text(PARROT)
    path = tmp_path / "tools.yaml"
    path.write_text(TOOLS.format(folder=tmp_path))
    return path


@asynccontextmanager
async def producing(
    tokenization: Tokenization,
    engine: ScriptedEngine,
    config: AgentsConfig,
    stats: EngineStats | None = None,
    greedy_baseline: bool = False,
    prompt_timeout_s: float = 600.0,
    reward: RewardConfig | None = None,
) -> AsyncIterator[tuple[MemoryReplayQueue, Producer]]:
    queue = MemoryReplayQueue(MemoryStore(), REPLAY)
    metrics = RolloutMetrics(CollectorRegistry())
    scorer = Scorer(reward or RewardConfig(), metrics)
    agents = Agents.load(config, 4096, tokenization)
    maker = GroupMaker(
        "test", "rollout-0", engine, tokenization, scorer, metrics, agents, greedy_baseline,  # type: ignore[arg-type]
    )  # fmt: skip
    rollout = RolloutConfig(max_concurrent_groups=4, prompt_timeout_s=prompt_timeout_s)
    producer = Producer(
        queue, "rollout-0", maker, rollout, REPLAY, metrics,
        may_lease=lambda: True, engine_stats=(lambda: stats) if stats else None,
    )  # fmt: skip
    loop = asyncio.create_task(producer.lease_loop())
    try:
        yield queue, producer
    finally:
        await end_task(loop)
        await producer.drain()
        await scorer.close()


async def submit(queue: MemoryReplayQueue, num_prompts: int = 1, key: str = "key", **fields: Any) -> list[int]:
    prompt = Prompt(messages=(("user", "hi"),), ground_truth="no", sampling=Sampling(max_tokens=200), **fields)
    payloads = [encode_prompt(prompt)] * num_prompts
    return list((await queue.submit(payloads, [0] * num_prompts, key)).prompt_ids)


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.005)


async def made(queue: MemoryReplayQueue, prompt_id: int) -> Group:
    async def is_queued() -> bool:
        return (await queue.stat()).queued > 0

    await eventually(is_queued)
    return decode_group(await queue.get_group(prompt_id))


@pytest.mark.parametrize(
    ("config", "reward", "score"),
    [
        ({"scored_text": "last_turn"}, 1.5, 1.0),
        ({"scored_text": "response"}, 0.5, 0.0),
        ({"scored_text": "last_turn", "turn_rewards": "replace"}, 0.5, 1.0),
        ({"scored_text": "last_turn", "turn_rewards": "record"}, 1.0, 1.0),
    ],
)
async def test_a_tool_group_survives_the_wire(
    tokenization: Tokenization, tools_file: Path, config: dict[str, Any], reward: float, score: float
) -> None:
    engine = ScriptedEngine([CALL, ANSWER], versions=[2, 5])
    async with producing(tokenization, engine, AgentsConfig(tools_file=tools_file, **config)) as (queue, producer):
        (prompt_id,) = await submit(queue, agent_name="tool_agent", num_samples=3)
        group = await made(queue, prompt_id)
    series = producer.metrics.registry.get_sample_value
    for name, value in (("rollout_turns", 2), ("trajectory_version_span", 3)):
        buckets = [series(f"penstock_{name}_bucket", {"le": f"{edge}.0"}) for edge in (value - 1, value, value + 1)]
        assert (buckets, series(f"penstock_{name}_sum")) == ([0, 3, 3], 3 * value)
    assert '"name": "parrot"' in tokenization.raw_text(group.prompt_token_ids.tolist())
    assert {request.request_id for request in engine.requests} == {
        f"{prompt_id}.1.{i}.{t}" for i in range(3) for t in (0, 1)
    }
    for trajectory in group.trajectories:
        ids = tuple(trajectory.token_ids.tolist())
        assert ids[: len(CALL)] == CALL
        assert ids[-len(ANSWER) :] == ANSWER
        inserted = slice(len(CALL), len(ids) - len(ANSWER))
        assert not trajectory.loss_mask[inserted].any()
        assert trajectory.loss_mask.sum() == len(CALL) + len(ANSWER)
        assert set(trajectory.token_versions()[inserted]) == {2}
        assert (trajectory.min_version, trajectory.max_version) == (2, 5)
        assert trajectory.reward == reward
        assert trajectory.reward_parts == {"score": score, "turn_1": 0.5, "turn_2": 0.0}


async def test_a_prompt_without_an_agent_gets_the_default_one(tokenization: Tokenization, tools_file: Path) -> None:
    config = AgentsConfig(tools_file=tools_file, default_agent="tool_agent")
    async with producing(tokenization, ScriptedEngine([CALL, ANSWER]), config) as (queue, _):
        [prompt_id] = await submit(queue)
        group = await made(queue, prompt_id)
    assert group.agent_name == "tool_agent"
    assert group.trajectories[0].reward_parts["turn_1"] == 0.5, "its tools were offered"


async def test_reward_functions_get_the_turns_of_each_sample(
    tokenization: Tokenization, tools_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': sum(extra_info['tool_rewards']) + extra_info['index'],\n"
        "            'turns': extra_info['num_turns'], 'scores': len(extra_info['turn_scores'])}\n"
    )
    config = AgentsConfig(tools_file=tools_file, turn_rewards="record")
    async with producing(
        tokenization, ScriptedEngine([CALL, ANSWER]), config, reward=RewardConfig(function_file=file)
    ) as (queue, _):
        ids = await submit(queue, agent_name="tool_agent", extra_info={"index": 4})
        group = await made(queue, ids[0])
    [trajectory] = group.trajectories
    assert (trajectory.reward, trajectory.reward_parts["turns"], trajectory.reward_parts["scores"]) == (4.5, 4, 0)
    assert trajectory.token_rewards == (), "recorded rewards are not trained"


@pytest.mark.parametrize(
    ("config", "reward", "first", "answer_end"),
    [
        ({}, 2.75, 0.75, 2.0),
        ({"turn_rewards": "replace"}, 0.5, 0.5, None),
        ({"turn_rewards": "last"}, 0.0, None, None),
        ({"turn_rewards": "record"}, 2.25, 0.25, 2.0),
    ],
)
async def test_a_reward_function_scores_turns_and_places_of_the_text(
    tokenization: Tokenization,
    tools_file: Path,
    tmp_path: Path,
    config: Any,
    reward: float,
    first: Any,
    answer_end: Any,
) -> None:
    """The tool gives 0.5 for the first turn. The function adds 0.25 to it, and 2 to the last letter of the answer."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'turn_scores': [0.25], 'text_scores': [[len(solution_str) - 1, 2.0]]}\n"
    )
    engine = ScriptedEngine([CALL, ANSWER])
    agents, scoring = AgentsConfig(tools_file=tools_file, **config), RewardConfig(function_file=tmp_path / "reward.py")
    async with producing(tokenization, engine, agents, reward=scoring) as (queue, _):
        (prompt_id,) = await submit(queue, agent_name="tool_agent")
        (trajectory,) = (await made(queue, prompt_id)).trajectories
    last = len(trajectory.token_ids) - 1
    assert trajectory.token_ids[last] == END, "the end token has no letter"
    placed = {len(CALL) - 1: first, last - 1: answer_end}
    assert {one.index: one.reward for one in trajectory.token_rewards} == {
        index: value for index, value in placed.items() if value is not None
    }
    assert trajectory.reward == reward


async def test_a_custom_agent_makes_a_group(tokenization: Tokenization) -> None:
    config = AgentsConfig(custom={"think_twice": f"{__file__}:think_twice"}, scored_text="last_turn")
    engine = ScriptedEngine([(*spelled("yes"), END), ANSWER])
    async with producing(tokenization, engine, config) as (queue, _):
        (prompt_id,) = await submit(queue, agent_name="think_twice")
        (trajectory,) = (await made(queue, prompt_id)).trajectories
    shown = tokenization.text(trajectory.token_ids[trajectory.loss_mask == 0].tolist())
    assert shown == "\nuser\nAre you sure?\nassistant\n"
    assert (trajectory.reward, trajectory.reward_parts) == (1.0, {})


async def test_a_greedy_sample_is_added_if_the_algorithm_needs_a_baseline(tokenization: Tokenization) -> None:
    engine = ScriptedEngine([ANSWER])
    async with producing(tokenization, engine, AgentsConfig(), greedy_baseline=True) as (queue, _):
        (prompt_id,) = await submit(queue, num_samples=2)
        group = await made(queue, prompt_id)
        (held_out,) = await submit(queue, key="other", num_samples=2, evaluation_id="held-out")

        async def is_evaluated() -> bool:
            return len(engine.requests) == 5

        await eventually(is_evaluated)
    assert [trajectory.is_baseline for trajectory in group.trajectories] == [False, False, True]
    temperatures = {request.request_id.split(".")[2]: request.sampling.temperature for request in engine.requests[:3]}
    assert temperatures == {"0": 1.0, "1": 1.0, "2": 0.0}
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 1.0, 1.0]
    assert {r.sampling.temperature for r in engine.requests if r.request_id.startswith(f"{held_out}.")} == {1.0}


@pytest.mark.parametrize("agent", ["returns_nothing", "cancels_itself"])
async def test_a_custom_agent_that_makes_no_episode_gives_the_prompt_back(
    tokenization: Tokenization, agent: str
) -> None:
    config = AgentsConfig(custom={"mine": f"{__file__}:{agent}"})
    async with producing(tokenization, ScriptedEngine([]), config) as (queue, producer):
        await submit(queue, agent_name="mine")

        async def is_dead() -> bool:
            return bool(await queue.dead_letter_reasons())

        await eventually(is_dead)
        assert producer.num_running == 0


async def test_a_straggler_past_the_prompts_deadline_is_aborted_and_its_prompt_given_back(
    tokenization: Tokenization,
) -> None:
    never = asyncio.Event()
    engine = ScriptedEngine([ANSWER], hold=lambda request: never if request.request_id.split(".")[2] == "1" else None)
    async with producing(tokenization, engine, AgentsConfig(), prompt_timeout_s=1.0) as (queue, producer):
        (prompt_id,) = await submit(queue, num_samples=2)

        async def is_dead() -> bool:
            return bool(await queue.dead_letter_reasons())

        await eventually(is_dead)
        assert await queue.dead_letter_reasons() == {"TimeoutError": 1}
        assert not engine.running and producer.num_running == 0
        asked = {request.request_id for request in engine.requests}
    assert asked == {f"{prompt_id}.{a}.{i}.0" for a in range(1, REPLAY.max_attempts + 1) for i in (0, 1)}


async def test_a_server_whose_engine_is_full_leases_fewer_groups(tokenization: Tokenization) -> None:
    never = asyncio.Event()
    engine = ScriptedEngine([ANSWER], hold=lambda request: never)
    full = EngineStats(running_requests=1, waiting_requests=9, kv_cache_usage=1.0)
    async with producing(tokenization, engine, AgentsConfig(), full) as (queue, producer):
        await submit(queue, num_prompts=8)

        async def is_running() -> bool:
            return bool(engine.running)

        await eventually(is_running)
        await asyncio.sleep(0.1)
        assert producer.num_running == 1
        series = producer.metrics.registry.get_sample_value
        names = ("rollout_inflight", "rollout_concurrency_limit", "rollout_outbox_groups")
        assert [series(f"penstock_{name}") for name in names] == [1, 1, 0]
    async with producing(tokenization, engine, AgentsConfig()) as (queue, producer):
        await submit(queue, num_prompts=8)

        async def are_running() -> bool:
            return producer.num_running == 4

        await eventually(are_running)
