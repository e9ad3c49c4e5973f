"""The reader of the queue, with the queue in memory."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.config.dataset import DatasetConfig
from penstock.config.learner import LearnerConfig
from penstock.config.service import ReplayConfig
from penstock.errors import DeadlineExceeded, InvalidInput
from penstock.trajectory import SESSION_AGENT, Group
from penstock_learner.loop import batches
from penstock_learner.loop.batches import BatchReader, DataEnd, FailedRewards, reason_to_discard
from penstock_learner.loop.step_loop import repeat_lost_commits
from penstock_learner.term import Ledger, Rewind, Term
from support.groups import made_by, make_group
from support.memory_queue import MemoryReplayQueue
from support.replay_backends import queue_with

REPLAY = ReplayConfig(groups_per_step=2, max_staleness=10)


def reader_of(
    queue: MemoryReplayQueue, replay: ReplayConfig = REPLAY, ledger: Ledger | None = None, timeout_s: float = 10.0
) -> BatchReader:
    return BatchReader(queue, replay, LearnerConfig(batch_timeout_s=timeout_s), Term(ledger=ledger or Ledger()))


async def test_a_starved_learner_says_so() -> None:
    reader = reader_of(await queue_with(REPLAY, [make_group(1)]), timeout_s=0.1)
    with pytest.raises(DeadlineExceeded, match="step 1 has 1 of 2 groups after 0 s; are prompts submitted"):
        await reader.read(1, 0)


async def test_a_token_that_the_model_does_not_have_is_dead_lettered() -> None:
    """A rank that looked it up would die, and its successor would take the same group again."""
    wrong = make_group(1)
    wrong.trajectories[0].token_ids[0] = 64
    negative = make_group(2)
    negative.prompt_token_ids[-1] = -1
    queue = await queue_with(REPLAY, [wrong, negative, make_group(3), make_group(4)])
    reader = BatchReader(queue, REPLAY, LearnerConfig(batch_timeout_s=10), Term(), vocabulary_size=64)
    assert (await reader.read(1, 0)).prompt_ids == [3, 4]
    assert (await queue.stat()).dead_lettered == 2


async def test_a_stale_session_is_dropped_for_good() -> None:
    """A rollout server would sample its prompt in one turn, and have no reward for it."""
    replay = ReplayConfig(groups_per_step=2, max_staleness=1, stale_policy="drop")
    session = replace(made_by(1, 0), agent_name=SESSION_AGENT)
    queue = await queue_with(replay, [session, made_by(2, 0), made_by(3, 4), made_by(4, 4)])
    assert (await reader_of(queue, replay).read(1, 4)).prompt_ids == [3, 4]
    stat = await queue.stat()
    assert (stat.expired, stat.discarded, stat.pending_prompts) == (2, 1, 1), "only prompt 2 is sampled again"
    assert await queue.expired_reasons() == {"stale": 2}


@pytest.mark.parametrize(("num_overdue", "trained"), [(0, [1, 2]), (1, [2, 3])])
async def test_wait_drops_old_groups_only_if_more_were_admitted_than_the_config_allows(
    num_overdue: int, trained: list[int]
) -> None:
    replay = ReplayConfig(groups_per_step=2, max_staleness=1, stale_policy="wait")
    reader = reader_of(await queue_with(replay, [made_by(1, 2), made_by(2, 3), made_by(3, 3)]), replay)
    reader.term.num_overdue = num_overdue
    assert (await reader.read(1, 4)).prompt_ids == trained


def failing(prompt_id: int, num_failed: int) -> Group:
    """A group whose first samples have no reward, because the function failed."""
    group = make_group(prompt_id)
    samples = (
        replace(sample, reward=0.0, reward_failed=index < num_failed) for index, sample in enumerate(group.trajectories)
    )
    return replace(group, trajectories=tuple(samples))


def with_spread(prompt_id: int) -> Group:
    group = make_group(prompt_id)
    first, *others = group.trajectories
    return replace(group, trajectories=(replace(first, reward=2.0), *others))


class Pauses:
    """The reasons for which a run was paused."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    async def __call__(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize("dynamic_sampling", [False, True])
async def test_a_step_whose_rewards_all_failed_pauses_the_run_and_is_not_trained(dynamic_sampling: bool) -> None:
    replay = ReplayConfig(groups_per_step=2, max_staleness=10, dynamic_sampling=dynamic_sampling)
    queue = await queue_with(replay, [failing(1, 4), failing(2, 4), failing(3, 4), with_spread(4), with_spread(5)])
    pauses = Pauses()
    learner, rewards = LearnerConfig(batch_timeout_s=10), FailedRewards(1.0, 2, pauses)
    reader = BatchReader(queue, replay, learner, Term(), failed_rewards=rewards)
    assert (await reader.read(1, 0)).prompt_ids == [4, 5]
    [reason] = pauses.reasons
    assert reason.startswith("the reward failed on 8 of the newest 8 samples")
    reasons = {"no_spread": 1, "reward_failed": 2} if dynamic_sampling else {"reward_failed": 3}
    assert await queue.expired_reasons() == reasons
    stat = await queue.stat()
    assert stat.pending_prompts == reasons["reward_failed"] and stat.conservation_error == 0


@pytest.mark.parametrize(
    ("limit", "failed", "num_pauses"),
    [(1.0, (4, 3), 0), (0.5, (4, 0), 1), (0.5, (0, 4), 1), (0.5, (3, 0), 0), (None, (4, 4), 0)],
)
async def test_the_share_of_failed_rewards_decides(
    limit: float | None, failed: tuple[int, int], num_pauses: int
) -> None:
    groups = [failing(number, count) for number, count in enumerate(failed, start=1)]
    queue = await queue_with(REPLAY, [*groups, make_group(3), make_group(4)])
    pauses = Pauses()
    rewards = FailedRewards(limit, 2, pauses)
    reader = BatchReader(queue, REPLAY, LearnerConfig(batch_timeout_s=10), Term(), failed_rewards=rewards)
    batch = await reader.read(1, 0)
    assert len(pauses.reasons) == num_pauses
    assert num_pauses or batch.prompt_ids == [1, 2]


@pytest.mark.parametrize(("last_batch", "num_pauses"), [("train", 1), ("drop", 0)])
async def test_the_last_smaller_step_is_judged_by_its_own_samples(last_batch: str, num_pauses: int) -> None:
    queue = await ended_queue(1, groups=[failing(1, 4)])
    pauses = Pauses()
    reader = BatchReader(
        queue, REPLAY, LearnerConfig(batch_timeout_s=0.1), Term(), failed_rewards=FailedRewards(1.0, 2, pauses),
        data_end=end_of(queue, last_batch=last_batch),
    )  # fmt: skip
    if last_batch == "drop":
        assert (await reader.read(1, 0)).groups == ()
    else:
        with pytest.raises(DeadlineExceeded):  # it waits for the prompt, which is to be sampled again
            await reader.read(1, 0)
        assert await queue.expired_reasons() == {"reward_failed": 1} and (await queue.stat()).pending_prompts == 1
    assert len(pauses.reasons) == num_pauses


async def test_no_deadline_runs_out_while_the_run_is_paused() -> None:
    queue, is_paused = await queue_with(REPLAY, [make_group(1)]), True

    async def paused() -> bool:
        return is_paused

    reader = BatchReader(queue, REPLAY, LearnerConfig(batch_timeout_s=0.05), Term(), is_paused=paused)
    reading = asyncio.create_task(reader.read(1, 0))
    await asyncio.wait({reading}, timeout=0.5)
    assert not reading.done()
    is_paused = False
    with pytest.raises(DeadlineExceeded, match="step 1 has 1 of 2 groups"):
        await reading


async def test_a_batch_that_is_read_ahead_has_no_deadline_until_it_is_wanted() -> None:
    reader, wanted = reader_of(await queue_with(REPLAY, [make_group(1)]), timeout_s=0.05), asyncio.Event()
    reading = asyncio.create_task(reader.read(1, 0, wanted))
    await asyncio.wait({reading}, timeout=0.5)
    assert not reading.done()
    wanted.set()
    with pytest.raises(DeadlineExceeded, match="step 1 has 1 of 2 groups"):
        await reading


async def test_groups_are_decoded_without_blocking_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    started, released, decode_group = threading.Event(), threading.Event(), batches.decode_group

    def held(payload: bytes) -> Group:
        started.set()
        assert released.wait(60), "the event loop was blocked"
        return decode_group(payload)

    monkeypatch.setattr(batches, "decode_group", held)
    reader = reader_of(await queue_with(REPLAY, [make_group(1), make_group(2)]))
    reading = asyncio.create_task(reader.read(1, 0))
    assert await asyncio.to_thread(started.wait, 10)
    released.set()
    assert (await reading).prompt_ids == [1, 2]


async def test_a_batch_larger_than_one_decoding_call_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "DECODED_AT_ONCE", 2)
    replay = ReplayConfig(groups_per_step=5, max_staleness=10)
    queue = await queue_with(replay, [make_group(1), make_group(2), b"rubbish", *map(make_group, (4, 5, 6))])
    assert (await reader_of(queue, replay).read(1, 0)).prompt_ids == [1, 2, 4, 5, 6]
    assert await queue.dead_letter_reasons() == {"corrupt": 1}


async def test_poison_is_dead_lettered_and_the_batch_is_filled_from_the_rest() -> None:
    queue = await queue_with(REPLAY, [b"rubbish", make_group(2), make_group(3)])
    batch = await reader_of(queue).read(1, 0)
    assert batch.prompt_ids == [2, 3]
    assert await queue.dead_letter_reasons() == {"corrupt": 1}


async def test_a_group_that_names_another_prompt_is_poison() -> None:
    queue = await queue_with(REPLAY, [make_group(777), make_group(2), make_group(3)])
    batch = await reader_of(queue).read(1, 0)
    assert batch.prompt_ids == [2, 3]
    assert await queue.dead_letter_reasons() == {"identity": 1}


async def test_remax_trains_no_group_without_its_greedy_sample() -> None:
    def with_baseline(group: Group) -> Group:
        first, *rest = group.trajectories
        return replace(group, trajectories=(*rest, replace(first, is_baseline=True)))

    queue = await queue_with(REPLAY, [make_group(1), with_baseline(make_group(2)), with_baseline(make_group(3))])
    learner = LearnerConfig.model_validate({"algorithm": {"advantage": {"name": "remax"}}})
    batch = await BatchReader(queue, REPLAY, learner, Term()).read(1, 0)
    assert batch.prompt_ids == [2, 3]
    assert await queue.dead_letter_reasons() == {"shape": 1}


async def test_what_the_ledger_holds_is_not_trained_again() -> None:
    queue = await queue_with(REPLAY, [make_group(1), make_group(2), make_group(3)])
    batch = await reader_of(queue, ledger=Ledger([(1, 1)])).read(1, 0)
    assert batch.prompt_ids == [2, 3]


async def test_groups_without_spread_are_replaced() -> None:
    replay = REPLAY.model_copy(update={"dynamic_sampling": True})
    flat = make_group(1)
    flat = replace(flat, trajectories=tuple(replace(t, reward=1.0) for t in flat.trajectories))
    spread = [
        replace(g, trajectories=tuple(replace(t, reward=float(i % 2)) for i, t in enumerate(g.trajectories)))
        for g in (make_group(2), make_group(3))
    ]
    queue = await queue_with(replay, [flat, *spread])
    batch = await reader_of(queue, replay).read(1, 0)
    assert batch.prompt_ids == [2, 3]
    stat = await queue.stat()
    assert (stat.expired, stat.conservation_error) == (1, 0)


async def test_the_reward_of_a_masked_sample_is_not_spread() -> None:
    replay = REPLAY.model_copy(update={"dynamic_sampling": True, "groups_per_step": 1})

    def made(prompt_id: int, num_masked: int) -> Group:
        """The masked samples have another reward than the others."""
        group = make_group(prompt_id)
        return replace(
            group,
            trajectories=tuple(
                replace(t, reward=float(i < num_masked), loss_mask=t.loss_mask * np.uint8(i >= num_masked))
                for i, t in enumerate(group.trajectories)
            ),
        )

    queue = await queue_with(replay, [made(1, num_masked=1), made(2, num_masked=4), made(3, num_masked=3)])
    batch = await reader_of(queue, replay).read(1, 0)
    assert batch.prompt_ids == [3], "one trained sample is compared with nothing, as a group of one"
    assert (await queue.stat()).discarded == 2


class Held:
    """A quarantine that holds the server `bad`, with one probe."""

    def __init__(self, probe: int) -> None:
        self.probe = probe

    async def refuses(self, group: Group) -> bool:
        return group.server_id == "bad" and group.prompt_id != self.probe


async def test_groups_of_a_server_in_quarantine_are_replaced_unless_they_are_probes() -> None:
    groups = [replace(make_group(number), server_id="bad" if number < 4 else "good") for number in range(1, 7)]
    queue = await queue_with(REPLAY, groups)
    reader = reader_of(queue)
    reader.quarantine = Held(probe=3)  # type: ignore[assignment]
    batch = await reader.read(1, 0)
    assert batch.prompt_ids == [3, 4]
    replaced = await reader.replace(batch, None, [3], "quarantined")
    assert replaced.prompt_ids == [4, 5]
    assert await queue.expired_reasons() == {"quarantined": 3}
    stat = await queue.stat()
    assert (stat.pending_prompts, stat.dead_lettered, stat.conservation_error) == (3, 0, 0)


async def test_groups_of_abandoned_versions_are_made_again() -> None:
    replay = REPLAY.model_copy(update={"stale_policy": "drop", "max_staleness": 2})
    groups = [made_by(1, 8), made_by(2, 3, 5), made_by(3, 9), made_by(4, 3), made_by(5, 3)]
    queue = await queue_with(replay, groups)
    reader = reader_of(queue, replay)
    batch = await reader.read(1, 4)
    assert batch.prompt_ids == [1, 2]
    reader.term.rewind(from_version=3, to_version=9)
    batch = await reader.replace_outdated(batch)
    assert batch.prompt_ids == [3, 4], "version 3 is not older than 9, which has the same weights"
    assert await reader.replace_outdated(batch) is batch
    stat = await queue.stat()
    assert (stat.pending_prompts, stat.queued, stat.expired, stat.conservation_error) == (2, 3, 2, 0)


def test_age_is_in_steps_of_training_through_rewinds() -> None:
    """Version 9 has the weights of 3 (4 to 8 are given up), and version 12 those of 10 (11 is given up)."""
    term = Term(lineage=(Rewind(from_version=3, to_version=9), Rewind(from_version=10, to_version=12)))
    ages = [13 - term.oldest_version(made_by(1, version)) for version in (13, 12, 10, 9, 3, 2, 1)]
    assert ages == [0, 1, 1, 2, 2, 3, 4]
    assert 13 - Term().oldest_version(made_by(1, 3)) == 10


def test_a_version_that_is_published_again_after_a_restart_is_not_a_step() -> None:
    """The learner died at version 7 and starts again from the checkpoint of version 4, as version 8."""
    restart = Rewind(from_version=4, to_version=8, why="restart")
    versions = np.array([3, 4, 5, 6, 7, 8, 9])
    assert Term(lineage=(restart,)).in_steps(versions).tolist() == [7, 8, 9, 10, 11, 8, 9]
    assert not restart.abandons(made_by(1, 6)), "its steps are trained again, so its samples are not lost"
    again = Rewind(from_version=9, to_version=11, why="restart")
    assert Term(lineage=(restart, again)).in_steps(versions).tolist() == [9, 10, 11, 12, 13, 10, 11]


def test_age_is_in_steps_where_a_rewind_goes_past_an_earlier_one() -> None:
    """Version 9 has the weights of 3, and version 12 those of 2, so everything between 2 and 12 is given up."""
    term = Term(lineage=(Rewind(from_version=3, to_version=9), Rewind(from_version=2, to_version=12)))
    assert [13 - term.oldest_version(made_by(1, version)) for version in (13, 12, 2, 1)] == [0, 1, 1, 2]


async def test_groups_that_are_too_many_steps_old_are_expired_whatever_their_number() -> None:
    replay = REPLAY.model_copy(update={"stale_policy": "drop", "max_staleness": 1})
    queue = await queue_with(replay, [made_by(1, 1), made_by(2, 2), made_by(3, 3)])
    reader = reader_of(queue, replay)
    reader.term.rewind(from_version=3, to_version=9)
    assert (await reader.read(1, 9)).prompt_ids == [2, 3]
    assert (await queue.stat()).expired == 1


async def ended_queue(num_groups: int, groups: Sequence[Group] = ()) -> MemoryReplayQueue:
    """A queue with the groups of a dataset, all of whose prompts were submitted if it has one epoch."""
    groups = groups or [make_group(prompt_id) for prompt_id in range(1, num_groups + 1)]
    queue = await queue_with(REPLAY, groups)
    await queue.feed("train", "f", 0, [b"p"] * num_groups, [0] * num_groups, num_groups)
    for lease in await queue.lease("s", num_groups):
        await queue.give_back("s", lease, "unreadable", is_final=True)
    return queue


def end_of(queue: MemoryReplayQueue, **dataset: object) -> DataEnd:
    return DataEnd(queue, DatasetConfig.model_validate({"file": "train.jsonl"} | dataset))


async def test_the_last_batch_has_what_is_left_of_the_dataset() -> None:
    queue = await ended_queue(3)
    reader = BatchReader(queue, REPLAY, LearnerConfig(batch_timeout_s=10), Term(), data_end=end_of(queue))
    assert [(await reader.read(step, 0)).prompt_ids for step in (1, 2, 3)] == [[1, 2], [3], []]


async def test_the_last_batch_is_dropped_if_the_config_says_so() -> None:
    queue = await ended_queue(3)
    end = end_of(queue, last_batch="drop")
    reader = BatchReader(queue, REPLAY, LearnerConfig(batch_timeout_s=10), Term(), data_end=end)
    assert [(await reader.read(step, 0)).prompt_ids for step in (1, 2)] == [[1, 2], []]
    assert await queue.expired_reasons() == {"remainder": 1}
    assert (await queue.stat()).conservation_error == 0
    with pytest.raises(InvalidInput, match="fewer prompts than replay.groups_per_step; set dataset.last_batch"):
        await end.raise_if_nothing_was_trained(0)


@pytest.mark.parametrize("waiting", [{"epochs": 2}, {"epochs": 0}, {"name": "other"}, {"file": None}, {}])
async def test_a_batch_is_completed_while_more_groups_may_come(waiting: dict[str, object]) -> None:
    queue = await ended_queue(3)
    if not waiting:
        await queue.submit([b"p"], [0], "")  # a client's prompt, which no server has leased yet
    end = end_of(queue, **waiting)
    reader = BatchReader(queue, REPLAY, LearnerConfig(batch_timeout_s=0.1), Term(), data_end=end)
    await reader.read(1, 0)
    with pytest.raises(DeadlineExceeded, match="step 2 has 1 of 2 groups"):
        await reader.read(2, 0)


async def test_data_of_which_nothing_was_trained_is_an_error() -> None:
    queue = await ended_queue(3)
    with pytest.raises(InvalidInput, match="ended before the first step: 3 prompts were dead-lettered"):
        await end_of(queue).raise_if_nothing_was_trained(0)
    await end_of(queue).raise_if_nothing_was_trained(1)


def rewarded(prompt_id: int, *rewards: float) -> Group:
    group = make_group(prompt_id)
    samples = zip(group.trajectories, rewards, strict=False)
    return replace(group, trajectories=tuple(replace(sample, reward=reward) for sample, reward in samples))


@pytest.mark.parametrize(
    ("limits", "left", "reason"),
    [
        ({}, [1, 2, 3, 4], ""),
        ({"min_spread": 0.6}, [2, 3], "no_spread"),
        ({"min_pass_rate": 0.5}, [1, 3], "pass_rate"),
        ({"max_pass_rate": 0.9}, [2, 3, 4], "pass_rate"),
        ({"min_pass_rate": 0.2, "max_pass_rate": 0.8}, [3], "pass_rate"),
        ({"max_response_tokens": 1}, [], "too_long"),
    ],
)
async def test_groups_are_filtered_by_rewards_and_lengths(
    limits: dict[str, float], left: list[int], reason: str
) -> None:
    groups = [rewarded(1, 1, 1, 1), rewarded(2, 0, 0, 0.9), rewarded(3, 0, 1, 1), rewarded(4, 0.5, 0.25, 0.5)]
    replay = ReplayConfig.model_validate({"groups_per_step": 4, "max_staleness": 10, "group_filter": limits})
    queue = await queue_with(replay, groups)
    with pytest.raises(DeadlineExceeded) if len(left) < 4 else contextlib.nullcontext():
        await reader_of(queue, replay, timeout_s=0.05).read(1, 0)
    dropped = {} if len(left) == 4 else {reason: 4 - len(left)}
    assert await queue.expired_reasons() == dropped
    assert [group.prompt_id for group in groups if not reason_to_discard(group, replay)] == left


async def test_commits_that_redis_has_lost_are_repeated_when_the_learner_ends() -> None:
    """Redis restarted without its newest writes: groups that a checkpoint covers wait again, and nobody takes them."""
    queue = await queue_with(REPLAY, [make_group(1), make_group(2), make_group(3)])
    await queue.commit(1, [1])
    await repeat_lost_commits(queue, Term(step=1, ledger=Ledger([(1, 2)])))
    stat = await queue.stat()
    assert (stat.trained, stat.queued, stat.conservation_error) == (2, 1, 0)
    assert (await queue.committed()).step == 1
