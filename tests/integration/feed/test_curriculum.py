"""A sampler of the user's own chooses rows, and sees the rewards of each row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.codec import decode_prompt, encode_group
from penstock.config.loading import validate
from penstock.errors import InvalidInput
from penstock.feed.dataset_feed import Curriculum, Feeder, PromptStream
from penstock.replay.queue import RedisReplayQueue
from support.groups import make_group

SAMPLER = """
class Hardest:
    def __init__(self, num_prompts, seed, start):
        self.means = {row: start for row in range(num_prompts)}
    def choose(self, count):
        ranked = sorted(self.means, key=self.means.get)
        return [ranked[place % len(ranked)] for place in range(count)]
    def observe(self, row, rewards):
        self.means[row] = sum(rewards) / len(rewards)

class Wrong:
    def __init__(self, num_prompts, seed):
        pass
    def choose(self, count):
        return [99] * count

class Failing:
    def __init__(self, num_prompts, seed):
        raise KeyError("x")
"""


def make_config(tmp_path: Path, sampler: str, **dataset: Any) -> Any:
    (tmp_path / "sampler.py").write_text(SAMPLER)
    rows = [{"prompt": str(i), "reward_model": {"ground_truth": i}} for i in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"file": str(tmp_path / "train.jsonl"), "sampler": f"{tmp_path}/sampler.py:{sampler}"} | dataset
    return validate({"model": {"path": "m"}, "dataset": fields, "replay": {"max_staleness": 1000}}, "test")


async def test_the_sampler_sees_the_rewards_of_its_rows(tmp_path: Path, queue: RedisReplayQueue) -> None:
    config = make_config(tmp_path, "Hardest", epochs=3, max_pending=4, sampler_kwargs={"start": 0.5})
    stream = PromptStream.read(config)
    curriculum = Curriculum.open(config, queue, len(stream.prompts))
    assert curriculum is not None
    feeder = Feeder(queue, stream, curriculum=curriculum)
    assert await feeder._feed() == (4, False)
    leased = await queue.lease("s", 9)
    assert [decode_prompt(lease.payload).ground_truth for lease in leased] == [0, 1, 2, 3]
    for lease, reward in zip(leased, (1.0, 0.0, 0.75, 0.25), strict=True):
        group = make_group(lease.prompt_id)
        samples = tuple(replace(sample, reward=reward) for sample in group.trajectories)
        assert await queue.append(lease, encode_group(replace(group, trajectories=samples)), 0) == "accepted"
    assert await feeder._feed() == (8, False)
    await queue.take_term(0)
    await queue.publish(1, 9, b"")  # opens admission
    again = [decode_prompt(lease.payload).ground_truth for lease in await queue.lease("s", 9)]
    assert again == [1, 3, 2, 0], "the hardest come first"
    assert await feeder._feed() == (12, True), "as many prompts as the epochs have"


@pytest.mark.parametrize(
    ("sampler", "message"), [("Wrong", "must choose 4 rows from 0 to 3"), ("Failing", "failed: KeyError: 'x'")]
)
async def test_a_sampler_that_is_wrong_ends_the_feed(
    tmp_path: Path, queue: RedisReplayQueue, sampler: str, message: str
) -> None:
    config = make_config(tmp_path, sampler)
    stream = PromptStream.read(config)
    with pytest.raises(InvalidInput, match=message):
        await Feeder(queue, stream, curriculum=Curriculum.open(config, queue, len(stream.prompts))).run()
