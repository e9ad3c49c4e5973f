"""Notices and phases: no text, and no refusal of Redis, ends the process that writes them."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from penstock.errors import PenstockError, Unavailable
from penstock.store.notices import MAX_OF_KIND, Event, NoticeBoard, Notices
from penstock.store.phases import Phases


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
