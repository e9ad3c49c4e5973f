"""A server that dies, drains or fails leaves the tokens of its samples, and another server continues them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from penstock.cancellation import end_task
from penstock.codec import decode_group, encode_prompt
from penstock.config.rollout import AdaptiveConcurrencyConfig, AgentsConfig, RewardConfig, RolloutConfig
from penstock.config.service import ReplayConfig
from penstock.errors import Unavailable
from penstock.replay.queue_types import Lease, SavedTokens
from penstock.trajectory import Group, Prompt, Sampling, VersionSegment
from penstock_rollout.agents.episode import Episode
from penstock_rollout.agents.loops import Agents, single_turn_agent
from penstock_rollout.agents.saved_samples import (
    SampleProgress,
    SavedSample,
    TokenSaver,
    encode_episode,
    encode_piece,
    read_samples,
)
from penstock_rollout.groups.producer import GroupMaker, Producer
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.tokenization import Tokenization
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore
from support.scripted_engines import PacedEngine, ScriptedEngine, make_context, make_tokenizer_folder, spelled, token_at

EVERY = 16
REPLAY = ReplayConfig(groups_per_step=64, max_staleness=2, lease_ttl_s=3600)


@pytest.fixture
def tokenization(tmp_path: Path) -> Tokenization:
    return Tokenization(make_tokenizer_folder(tmp_path / "model"))


class Server:
    """A producer with a paced engine."""

    def __init__(
        self, name: str, queue: MemoryReplayQueue, engine: PacedEngine, tokenization: Tokenization, scorer: Scorer,
        metrics: RolloutMetrics, max_groups: int,
    ) -> None:  # fmt: skip
        self.engine, self.metrics, self.name = engine, metrics, name
        self.saver = TokenSaver(queue, engine, name, metrics, EVERY, REPLAY.max_staleness)  # type: ignore[arg-type]
        agents = Agents.load(AgentsConfig(), 4096, tokenization)
        maker = GroupMaker(
            "test", name, engine, tokenization, scorer, metrics, agents, saver=self.saver,  # type: ignore[arg-type]
        )  # fmt: skip
        rollout = RolloutConfig(
            max_concurrent_groups=max_groups, adaptive_concurrency=AdaptiveConcurrencyConfig(enabled=False)
        )
        self.producer = Producer(
            queue, name, maker, rollout, REPLAY, metrics, may_lease=lambda: True, saver=self.saver
        )  # fmt: skip

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"penstock_rollout_{name}_total", labels) or 0.0


@asynccontextmanager
async def serving(
    queue: MemoryReplayQueue, tokenization: Tokenization, name: str, engine: PacedEngine, max_groups: int = 4
) -> AsyncIterator[Server]:
    metrics = RolloutMetrics(CollectorRegistry())
    scorer = Scorer(RewardConfig(), metrics)
    server = Server(name, queue, engine, tokenization, scorer, metrics, max_groups)
    loops = [asyncio.create_task(server.producer.lease_loop()), asyncio.create_task(server.saver.save_loop())]
    try:
        yield server
    finally:
        for loop in loops:
            await end_task(loop)
        for worker in list(server.producer._workers.values()):
            await end_task(worker)
        await scorer.close()


async def submit(queue: MemoryReplayQueue, num_samples: int, max_tokens: int = 100, num_prompts: int = 1) -> None:
    prompt = Prompt(
        messages=(("user", "hi"),), ground_truth="x", sampling=Sampling(max_tokens=max_tokens), num_samples=num_samples
    )
    await queue.submit([encode_prompt(prompt)] * num_prompts, [0] * num_prompts, "")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def finished(queue: MemoryReplayQueue, prompt_id: int = 1) -> Group:
    await until(lambda: prompt_id in queue.store.groups)
    return decode_group(await queue.get_group(prompt_id))


def assert_whole(group: Group, max_tokens: int = 100) -> None:
    """Every sample has the tokens and log-probs that an undisturbed engine would have made."""
    first = len(group.prompt_token_ids)
    ids = [token_at(first + index) for index in range(max_tokens)]
    for trajectory in group.trajectories:
        assert trajectory.token_ids.tolist() == ids
        np.testing.assert_allclose(trajectory.log_probs, [-1 / token for token in ids], rtol=1e-6)
        assert trajectory.finish_reason == "length" and trajectory.loss_mask.all()


async def test_another_server_continues_what_a_dead_one_saved(tokenization: Tokenization) -> None:
    queue = MemoryReplayQueue(MemoryStore(), REPLAY)
    await submit(queue, num_samples=3)
    first, second = PacedEngine(7, {0: 40, 1: 5}), PacedEngine(8)
    async with serving(queue, tokenization, "a", first) as server:
        # Sample 0 has saved two pieces, sample 1 none, and sample 2 is finished.
        await until(lambda: server.value("saved_tokens") == 32 + 100)
    await queue.give_back("a", Lease(1, 1, b""))
    async with serving(queue, tokenization, "b", second) as server:
        group = await finished(queue)
        assert server.value("continued_tokens") == 132
        assert server.value("regenerated_tokens", reason="lost") == 2 * EVERY / 2
    assert_whole(group)
    assert second.num_sampled == 68 + 100
    assert [request.sampling.max_tokens for request in second.requests] == [68, 100]
    begun, fresh, done = group.trajectories
    assert begun.segments == (VersionSegment(0, 32, 7), VersionSegment(32, 100, 8))
    assert (fresh.segments, done.segments) == ((VersionSegment(0, 100, 8),), (VersionSegment(0, 100, 7),))
    assert [t.server_ids for t in group.trajectories] == [("a", "b"), (), ("a",)]
    assert (group.server_id, group.attempt) == ("b", 2)
    stat = await queue.stat()
    assert (stat.saved_bytes, stat.conservation_error) == (0, 0)


async def test_a_server_that_drains_hands_over_every_token(tokenization: Tokenization) -> None:
    queue = MemoryReplayQueue(MemoryStore(), REPLAY)
    await submit(queue, num_samples=3)
    first, second = PacedEngine(7, {0: 40, 1: 5}), PacedEngine(7)
    async with serving(queue, tokenization, "a", first) as server:
        await until(lambda: first.num_sampled == 40 + 5 + 100)
        await server.producer.drain()
        assert server.value("failures", reason="internal") == 0
    assert (await queue.stat()).reclaimed == 0
    async with serving(queue, tokenization, "b", second) as server:
        assert_whole(await finished(queue))
        assert server.value("continued_tokens") == 145
        assert server.value("regenerated_tokens", reason="lost") == 0
    assert first.num_sampled + second.num_sampled == 300, "no token was generated again"


class SlowReward:
    """A reward that takes as long as the test."""

    async def score(self, *_: Any) -> list[Any]:
        await asyncio.Event().wait()
        return []


async def test_a_group_that_is_being_scored_is_handed_over(tokenization: Tokenization) -> None:
    queue = MemoryReplayQueue(MemoryStore(), REPLAY)
    await submit(queue, num_samples=2)
    first, second = PacedEngine(0), PacedEngine(0)
    async with serving(queue, tokenization, "a", first) as server:
        server.producer.maker.scorer = SlowReward()  # type: ignore[assignment]
        await until(lambda: first.num_sampled == 200)
        await server.producer.drain()
    async with serving(queue, tokenization, "b", second):
        group = await finished(queue)
    assert_whole(group)
    assert second.num_sampled == 0 and {t.server_ids for t in group.trajectories} == {("a",)}


async def test_a_chain_of_servers_makes_one_sample(tokenization: Tokenization) -> None:
    queue = MemoryReplayQueue(MemoryStore(), REPLAY)
    await submit(queue, num_samples=1)
    for version, name in enumerate("abc"):
        engine = PacedEngine(version, {0: 30})
        async with serving(queue, tokenization, name, engine) as server:
            await until(lambda engine=engine: engine.num_sampled == 30)  # type: ignore[misc]
            await server.producer.drain()
    async with serving(queue, tokenization, "c", PacedEngine(2)):
        group = await finished(queue)
    assert_whole(group)
    [trajectory] = group.trajectories
    assert [(s.start, s.end, s.policy_version) for s in trajectory.segments] == [(0, 30, 0), (30, 60, 1), (60, 100, 2)]
    assert trajectory.server_ids == ("a", "b", "c")


async def test_pieces_are_sent_again_if_the_store_does_not_answer(
    tokenization: Tokenization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_rollout.agents.saved_samples.RETRY_S", 0.01)
    monkeypatch.setattr("penstock_rollout.agents.saved_samples.MAX_BYTES", 1)
    queue = MemoryReplayQueue(MemoryStore(), REPLAY)
    save_tokens, num_calls = queue.save_tokens, 0

    async def unreliable(*arguments: Any) -> list[int]:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 2:
            raise Unavailable("Redis is restarting")
        return await save_tokens(*arguments)

    monkeypatch.setattr(queue, "save_tokens", unreliable)
    await submit(queue, num_samples=2)
    async with serving(queue, tokenization, "a", PacedEngine(0, {0: 40, 1: 40})) as server:
        await until(lambda: server.value("saved_tokens") == 2 * 32)
    assert [piece.start for piece in await queue.saved_tokens(Lease(1, 1, b""))] == [0, 16, 0, 16]
    assert num_calls == 8, "each piece alone, twice"


@pytest.mark.parametrize(("version", "continued"), [(2, 30), (3, 0)])
async def test_tokens_that_are_too_old_are_generated_again(
    tokenization: Tokenization, version: int, continued: int
) -> None:
    queue = MemoryReplayQueue(MemoryStore(), REPLAY)
    await submit(queue, num_samples=1)
    first = PacedEngine(0, {0: 30})
    async with serving(queue, tokenization, "a", first) as server:
        await until(lambda: first.num_sampled == 30)
        await server.producer.drain()
    async with serving(queue, tokenization, "b", PacedEngine(version)) as server:
        group = await finished(queue)
        assert server.value("continued_tokens") == continued
        assert server.value("regenerated_tokens", reason="stale") == 30 - continued
    assert_whole(group)
    assert group.min_version == (0 if continued else 3)


async def test_a_held_out_prompt_is_answered_by_one_version(tokenization: Tokenization) -> None:
    queue = MemoryReplayQueue(MemoryStore(), REPLAY)
    sampling = Sampling(max_tokens=100)
    prompt = Prompt(messages=(("user", "hi"),), ground_truth="x", sampling=sampling, evaluation_id="heldout-1")
    await queue.create_evaluation("heldout-1", [encode_prompt(prompt)])
    first, second = PacedEngine(0, {0: 30}), PacedEngine(1)
    async with serving(queue, tokenization, "a", first) as server:
        await until(lambda: first.num_sampled == 30)
        await server.producer.drain()
    async with serving(queue, tokenization, "b", second):
        await until(lambda: queue.store.evaluations["heldout-1"].num_finished == 1)
    assert second.num_sampled == 100
    assert (await queue.get_evaluation("heldout-1")).policy_version_min == 1


async def test_a_sample_that_is_not_finite_is_not_continued(tokenization: Tokenization) -> None:
    queue = MemoryReplayQueue(MemoryStore(), REPLAY)
    await submit(queue, num_samples=2)
    bad = PacedEngine(0, {1: 40}, bad_after=60)
    async with serving(queue, tokenization, "a", bad, max_groups=1) as server:
        await until(lambda: server.value("failures", reason="non_finite") > 0)
        server.producer.may_lease = lambda: False
        await until(lambda: server.producer.num_running == 0)
    assert (await queue.stat()).saved_bytes == 0, "its siblings come from the same weights"
    async with serving(queue, tokenization, "b", PacedEngine(0)) as server:
        assert_whole(await finished(queue))
        assert server.value("continued_tokens") == 0


async def test_a_slow_sample_leaves_the_places_of_its_siblings_to_others(tokenization: Tokenization) -> None:
    """One place; the first sample of every group of four never ends. A fourth of a place is then taken by each."""
    queue = MemoryReplayQueue(MemoryStore(), REPLAY)
    await submit(queue, num_samples=4, max_tokens=5, num_prompts=9)
    engine = PacedEngine(0, {0: 2})
    async with serving(queue, tokenization, "a", engine, max_groups=2) as server:
        await until(lambda: server.producer.num_running == 5)
        await asyncio.sleep(0.05)
        assert server.producer.num_running == 5, "four quarters, and a group that takes the second place until it ends"
        engine.go_on.set()
        await until(lambda: len(queue.store.groups) == 9)


# ── one sample ──


def progress_of(saved: SavedSample | None) -> SampleProgress:
    queue = MemoryReplayQueue(MemoryStore(), REPLAY)
    metrics = RolloutMetrics(CollectorRegistry())
    saver = TokenSaver(queue, PacedEngine(), "b", metrics, EVERY, 2)  # type: ignore[arg-type]
    return SampleProgress(saver, Lease(7, 2, b""), 0, saved)


def saved_text(text: str) -> SavedSample:
    ids = list(spelled(text))
    return SavedSample(ids, [-0.5] * len(ids), (VersionSegment(0, len(ids), 3),), ("a",))


async def test_a_stop_text_is_found_across_the_seam(tokenization: Tokenization) -> None:
    engine = ScriptedEngine([spelled("op!more")])
    context = make_context(engine, tokenization)
    context = replace(context, sampling=replace(context.sampling, stop=("stop!",)))
    episode = await single_turn_agent(replace(context, progress=progress_of(saved_text("and st"))))
    assert tokenization.text(episode.token_ids.tolist()) == "and stop!"
    assert episode.finish_reason == "stop"
    assert episode.segments == (VersionSegment(0, 6, 3), VersionSegment(6, 9, 0))


@pytest.mark.parametrize(
    ("limits", "max_tokens"),
    [({"max_tokens": 10}, 4), ({"max_tokens": 100, "max_turn_tokens": 9}, 3), ({"max_tokens": 6}, None),
     ({"max_tokens": 100, "max_turn_tokens": 5}, None)],
)  # fmt: skip
async def test_limits_count_from_the_start_of_the_response(
    tokenization: Tokenization, limits: dict[str, Any], max_tokens: int | None
) -> None:
    engine = ScriptedEngine([spelled("abcdefghijkl")])
    context = make_context(engine, tokenization, **limits)
    episode = await single_turn_agent(replace(context, progress=progress_of(saved_text("and st"))))
    assert [request.sampling.max_tokens for request in engine.requests] == ([max_tokens] if max_tokens else [])
    assert len(episode.token_ids) == 6 + (max_tokens or 0)
    assert episode.finish_reason == "length"


async def test_a_seeded_sample_continues_with_other_random_numbers(tokenization: Tokenization) -> None:
    seeds = set()
    for text in ("", "a", "ab"):
        engine = ScriptedEngine([spelled("xyz")])
        context = make_context(engine, tokenization, seed=5)
        progress = progress_of(saved_text(text) if text else None)
        await single_turn_agent(replace(context, progress=progress))
        seeds.add(engine.requests[0].sampling.seed)
    assert len(seeds) == 3 and 5 in seeds


# ── the stored form ──


def piece(sample: int, start: int, length: int, version: int = 0) -> SavedTokens:
    ids = range(start, start + length)
    segments = [VersionSegment(start, start + length, version)]
    payload = encode_piece(list(ids), [-float(i) for i in ids], segments, f"s{version}", is_handed_over=False)
    return SavedTokens(sample, start, payload)


def test_pieces_are_joined_up_to_a_gap_or_a_damaged_one() -> None:
    damaged = replace(piece(1, 4, 4), payload=piece(1, 4, 4).payload[:-1] + b"!")
    pieces = [piece(0, 4, 4, 1), piece(0, 0, 4), piece(0, 9, 4), piece(1, 0, 4), damaged, piece(2, 3, 4)]
    samples = read_samples(pieces)
    assert {number: sample.token_ids for number, sample in samples.items()} == {0: [*range(8)], 1: [*range(4)]}
    assert samples[0].segments == (VersionSegment(0, 4, 0), VersionSegment(4, 8, 1))
    assert (samples[0].server_ids, samples[1].server_ids) == (("s0", "s1"), ("s0",))


def test_a_finished_episode_survives_whole() -> None:
    episode = Episode(
        token_ids=np.array([4, 5, 6], np.int32), loss_mask=np.array([1, 0, 1], np.uint8),
        log_probs=np.array([-1, 0, -2], np.float32), segments=(VersionSegment(0, 3, 2),), finish_reason="stop",
        num_turns=2, last_turn_start=2, num_user_turns=1, tool_rewards=(0.5,), turn_scores=(1.0,),
        turn_rewards=(0.5, 1.0), token_rewards={1: 0.25}, final_reward=0.0, reward_parts={"x": 3.0},
        routed_experts=np.arange(12, dtype=np.uint8).reshape(3, 2, 2), server_ids=("a", "b"),
    )  # fmt: skip
    found = read_samples([piece(0, 2, 1), SavedTokens(0, 0, encode_episode(episode, "b"))])[0].episode
    assert found is not None
    for name in Episode.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(found, name), getattr(episode, name), name)
