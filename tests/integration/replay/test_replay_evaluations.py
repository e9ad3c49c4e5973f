"""Conformance suite of replay backends: held-out prompts, their evaluations and the scores that are kept."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from penstock.config.service import ReplayConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import KEPT_EVALUATION_S
from penstock.store.ownership import Owner
from support.replay_backends import (  # noqa: F401 the fixtures
    MakeQueue,
    ReplayQueue,
    queue_maker,
    queue_of_backend,
    submit,
)


async def test_evaluations_are_scored_and_never_queued(queue: ReplayQueue) -> None:
    await queue.create_evaluation("heldout", [b"q1", b"q2"])
    assert (await queue.create_evaluation("heldout", [b"other"])).num_prompts == 2
    first, second = await queue.lease("s", 5)
    await queue.record_evaluation("heldout", first, [1.0, 0.0], 3, 4)
    await queue.record_evaluation("heldout", first, [1.0, 1.0], 3, 4)
    await queue.give_back("s", second)
    [second] = await queue.lease("s", 5)
    await queue.record_evaluation("heldout", second, [1.0, 1.0], 4, 5)
    evaluation = await queue.get_evaluation("heldout")
    assert (evaluation.num_finished, evaluation.score) == (2, 0.75)
    assert (evaluation.policy_version_min, evaluation.policy_version_max) == (3, 5)
    assert (evaluation.num_samples, evaluation.pass_at) == (4, {1: 0.75, 2: 1.0})
    stat = await queue.stat()
    assert (stat.admitted, stat.in_flight) == (0, 0)


async def test_an_evaluation_can_be_read_for_a_limited_time_once_it_is_complete(make_queue: MakeQueue) -> None:
    queue = make_queue()
    if not isinstance(queue, RedisReplayQueue):
        return
    await queue.create_evaluation("heldout-1", [b"q1", b"q2"])
    first, second = await queue.lease("s", 5)
    await queue.record_evaluation("heldout-1", first, [1.0], 0, 0)
    assert await queue.client.ttl(queue.keys.evaluation("heldout-1")) == -1
    await queue.give_back("s", second, "bad", is_final=True)
    assert await queue.client.ttl(queue.keys.evaluation("heldout-1")) > 24 * 3600


async def test_an_evaluation_has_the_scores_of_each_data_source(queue: ReplayQueue) -> None:
    await queue.create_evaluation("heldout", [b"q1", b"q2", b"q3"])
    first, second, third = await queue.lease("s", 5)
    await queue.record_evaluation("heldout", first, [1.0, 0.0], 0, 0, "math", ["4", "5"])
    await queue.record_evaluation("heldout", second, [1.0, 1.0], 0, 0, "math", ["7", "7"])
    await queue.record_evaluation(
        "heldout", third, [0.5, 0.5], 0, 0, "judged", parts={"acc": [1.0, 0.0], "format": [None, 0.25]}
    )
    evaluation = await queue.get_evaluation("heldout", part="acc")
    assert evaluation.parts == {"judged": {"acc": 0.5, "format": 0.25}}
    assert evaluation.pass_at == {1: pytest.approx(1 / 6), 2: pytest.approx(1 / 3)}
    assert (await queue.get_evaluation("heldout")).pass_at == {1: pytest.approx(0.5), 2: pytest.approx(2 / 3)}
    by_source = evaluation.by_source
    assert by_source["judged"] == {
        "mean@2": 0.5, "best@2/mean": 0.5, "acc/mean@2": 0.5, "acc/best@2/mean": 0.75,
    }  # fmt: skip
    assert by_source["math"].keys() == {"mean@2", "best@2/mean", "maj@2/mean"}
    assert (by_source["math"]["mean@2"], by_source["math"]["best@2/mean"]) == (0.75, 0.875)


async def test_groups_of_an_evaluation_are_kept_while_there_is_room_until_they_are_forgotten(
    make_queue: MakeQueue,
) -> None:
    queue = make_queue(capacity_bytes=2**20)
    await queue.create_evaluation("heldout-1", [b"q"] * 4)
    first, second, third, fourth = await queue.lease("s", 5)
    for lease, group in ((first, b"a\x00b"), (second, b""), (third, b"x" * 2**18), (third, b"twice")):
        await queue.record_evaluation("heldout-1", lease, [1.0], 0, 0, kept_group=group)
    await queue.give_back("s", fourth, "bad", is_final=True)
    kept = await queue.kept_groups("heldout-1")
    assert (kept.prompt_ids, kept.num_omitted) == ((first.prompt_id,), 1)
    assert await queue.fetch_kept("heldout-1", [third.prompt_id, first.prompt_id]) == [b"a\x00b"]
    assert await queue.fetch_kept("heldout-1", []) == []
    if isinstance(queue, RedisReplayQueue):
        assert 0 < await queue.client.ttl(queue.keys.evaluation_groups("heldout-1")) <= KEPT_EVALUATION_S
    await queue.forget_kept("heldout-1")
    assert (await queue.kept_groups("heldout-1")).prompt_ids == ()
    assert (await queue.kept_groups("unknown-1")).prompt_ids == ()


async def test_the_first_groups_of_an_evaluation_are_kept_with_their_prompts(queue: ReplayQueue) -> None:
    await submit(queue, 3)
    await queue.create_evaluation("heldout-1", [b"q1", b"q2", b"q3"])
    held_out = [lease for lease in await queue.lease("s", 9) if lease.payload.startswith(b"q")]
    for lease in reversed(held_out):
        await queue.record_evaluation("heldout-1", lease, [1.0], 0, 0, kept_group=b"of " + lease.payload, num_kept=2)
    kept = await queue.kept_groups("heldout-1")
    assert kept.prompt_ids == tuple(lease.prompt_id for lease in held_out[:2]) and kept.num_omitted == 0
    assert await queue.fetch_kept("heldout-1", kept.prompt_ids) == [b"of q1", b"of q2"]
    assert await queue.fetch_kept("heldout-1", kept.prompt_ids[1:], "prompt:") == [b"q2"]


@pytest.mark.parametrize("sees_all", [False, True])
async def test_no_group_of_a_teams_evaluation_is_kept(redis_client: redis.Redis, sees_all: bool) -> None:
    """The learner's reward model does not find the evaluation, and would not forget its groups."""
    queue = RedisReplayQueue(redis_client, "test", ReplayConfig())
    await queue.create_evaluation("heldout-1", [b"q"], Owner("someone", sees_all))
    [lease] = await queue.lease("s", 1)
    await queue.record_evaluation("heldout-1", lease, [1.0], 0, 0, kept_group=b"group")
    assert len((await queue.kept_groups("heldout-1")).prompt_ids) == sees_all
    assert await queue.evaluation_history() == ({"heldout-1": 1.0} if sees_all else {})


async def test_scores_are_kept_by_name_and_number(queue: ReplayQueue) -> None:
    await queue.record_scores(10, {"openai/gsm8k/reward/mean@8": 0.25})
    await queue.record_scores(20, {"openai/gsm8k/reward/mean@8": 0.5, "aime/reward/mean@8": 0.0})
    assert await queue.evaluation_scores() == {"openai/gsm8k/reward/mean@8": 0.5, "aime/reward/mean@8": 0.0}
    assert await queue.evaluation_history() == {
        "openai/gsm8k/reward/mean@8-10": 0.25, "openai/gsm8k/reward/mean@8-20": 0.5, "aime/reward/mean@8-20": 0.0,
    }  # fmt: skip


async def test_details_never_take_the_room_of_scores(queue: ReplayQueue) -> None:
    details = {f"math/part{number}/mean": 1.0 for number in range(100)}
    for step in range(1, 100):
        await queue.record_scores(step, {"math/reward/mean@1": 0.5}, details)
    assert len(await queue.evaluation_scores()) == 64 and len(await queue.evaluation_history()) < 3100
    await queue.record_scores(100, {f"source{number}/reward/mean@1": 0.5 for number in range(256)}, details)
    assert len(await queue.evaluation_scores()) == 320
    for step in range(101, 120):
        await queue.record_scores(step, {f"source{number}/reward/mean@1": 0.5 for number in range(256)})
    history = await queue.evaluation_history()
    assert sum("/reward/" in name for name in history) >= 5000 and history["source255/reward/mean@1-118"] == 0.5


async def test_held_out_prompts_and_training_share_the_places_of_a_server(queue: ReplayQueue) -> None:
    await submit(queue, 2)
    await queue.create_evaluation("heldout", [b"q"] * 4)
    leased = [lease.payload for lease in await queue.lease("s", 2)]
    assert sorted(leased) == sorted([b"q", leased[1]]) and leased[1] != b"q", "one of each"
    [third] = await queue.lease("s", 1)
    [fourth] = await queue.lease("s", 1)
    assert sorted([third.payload == b"q", fourth.payload == b"q"]) == [False, True], "and in turns, place by place"
    assert [lease.payload for lease in await queue.lease("s", 5)] == [b"q"] * 2, "nothing to train: all are held out"


async def test_the_newest_score_of_a_benchmark_is_kept(queue: ReplayQueue) -> None:
    for evaluation_id, rewards in (("math-10", [1.0, 0.0]), ("math-20", [1.0, 1.0]), ("other", [0.0])):
        await queue.create_evaluation(evaluation_id, [b"q"])
        [lease] = await queue.lease("s", 5)
        await queue.record_evaluation(evaluation_id, lease, rewards, 0, 0)
    await queue.create_evaluation("math-30", [b"q1", b"q2"])
    lease, _ = await queue.lease("s", 5)
    await queue.record_evaluation("math-30", lease, [0.0], 0, 0)
    assert await queue.evaluation_scores() == {"math": 1.0, "other": 0.0}, "one that is not finished has no score"
    assert await queue.evaluation_history() == {"math-10": 0.5, "math-20": 1.0}
