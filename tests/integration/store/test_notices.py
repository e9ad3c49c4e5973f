"""Notices and phases: no text, and no refusal of Redis, ends the process that writes them."""

from __future__ import annotations

import json

import pytest
import redis.asyncio as redis

from penstock.errors import PenstockError, Unavailable
from penstock.store.heartbeats import Phases
from penstock.store.notices import MAX_OF_KIND, SHOWN_S, Event, NoticeBoard, Notices


async def test_text_that_is_not_unicode_is_written_with_question_marks(redis_client: redis.Redis) -> None:
    notices = Notices(redis_client, "test")
    board = NoticeBoard(notices)
    board.post(Event("reward_failed", "place \ud83d", "half of 😀: \ud83d", "Traceback \udcff"))
    await board.write()
    [notice] = await notices.newest_first()
    assert (notice.text, notice.detail, notice.count) == ("half of 😀: ?", "Traceback ?", 1)
    phases = Phases(redis_client, "test")
    await phases.enter("learner", "loading \udcff")
    [phase] = (await phases.by_component())["learner"]
    assert phase.name == "loading ?"
    assert 0 <= await phases.age_s(phase) < 60


async def test_a_notice_that_redis_refuses_is_dropped_and_the_next_is_written(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notices = Notices(redis_client, "test")
    board, record, errors = NoticeBoard(notices), notices.record, [PenstockError("Redis refused"), Unavailable("away")]

    async def refuse(event: Event, count: int = 1) -> None:
        if errors:
            raise errors.pop(0)
        await record(event, count)

    monkeypatch.setattr(notices, "record", refuse)
    board.post(Event("reward_failed", "a", "refused"))
    board.post(Event("reward_failed", "b", "kept"))
    with pytest.raises(Unavailable):
        await board.write()
    assert "a notice is dropped (Redis refused): refused" in caplog.text
    await board.write()
    assert [notice.text for notice in await notices.newest_first()] == ["kept"], "it waited while Redis was away"


async def test_a_start_goes_on_if_redis_refuses_its_phase(
    redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    phases = Phases(redis_client, "test")
    await redis_client.set(phases.keys.phases, "not a hash")
    await phases.enter("learner", "loading the model")
    assert "cannot record the phase: Redis refused a command" in caplog.text


@pytest.mark.parametrize("writes_between", [False, True])
async def test_many_unknown_data_sources_do_not_hide_a_failed_reward(
    redis_client: redis.Redis, writes_between: bool
) -> None:
    notices = Notices(redis_client, "test")
    board = NoticeBoard(notices)
    for number in range(50):
        board.post(Event("default_reward", f"source {number}", f"unknown data source {number}"))
        if writes_between:
            await board.write()
    board.post(Event("reward_failed", "reward.py:3", "the reward failed"))
    await board.write()
    shown = [notice.text for notice in await notices.newest_first()]
    assert "the reward failed" in shown
    assert set(shown) - {"the reward failed"} == {f"unknown data source {number}" for number in range(MAX_OF_KIND)}


async def test_a_restart_is_shown_for_ten_minutes_and_makes_room_for_others(redis_client: redis.Redis) -> None:
    notices = Notices(redis_client, "test")
    await notices.record(Event("reward_failed", "place", "stays"))
    for number in range(MAX_OF_KIND):
        await notices.record(Event("process_restarted", f"rollout-{number}", "died"), 3)
    assert len(await notices.newest_first()) == MAX_OF_KIND + 1
    for key, text in (await redis_client.hgetall(notices.keys.notices)).items():
        earlier = {"last_at_ms": json.loads(text)["last_at_ms"] - 1000 * SHOWN_S - 1}
        await redis_client.hset(notices.keys.notices, key, json.dumps(json.loads(text) | earlier))
    assert [notice.text for notice in await notices.newest_first()] == ["stays"]
    await notices.record(Event("process_restarted", "rollout-0", "died again"))
    await notices.record(Event("process_restarted", "rollout-99", "another died"))
    found = [(notice.text, notice.count) for notice in await notices.newest_first()]
    assert sorted(found) == [("another died", 1), ("died again", 1), ("stays", 1)]
    await notices.remove([Event("process_restarted", "rollout-0", "")])
    assert {notice.text for notice in await notices.newest_first()} == {"another died", "stays"}
