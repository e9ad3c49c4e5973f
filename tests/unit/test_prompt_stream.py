"""The order of a dataset: every prompt comes once per epoch, and the same seed gives the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.codec import decode_prompt, encode_prompt
from penstock.config.dataset import DatasetConfig
from penstock.config.run import RunConfig
from penstock.errors import InvalidInput
from penstock.feed.dataset_feed import PromptStream
from penstock.trajectory import Prompt, Sampling


def stream(num_prompts: int = 10, seed: int = 1, **fields: Any) -> PromptStream:
    prompts = [Prompt(messages=(("user", str(i)),), num_samples=4, sampling=Sampling()) for i in range(num_prompts)]
    return PromptStream(prompts, DatasetConfig(**({"epochs": 2} | fields)), seed)


def numbers(prompts: list[Prompt]) -> list[int]:
    return [int(prompt.messages[0][1]) for prompt in prompts]


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own() -> None:
    order = numbers(stream(100, epochs=3).chunk(0, 1000))
    epochs = [order[:100], order[100:200], order[200:]]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3 and list(range(100)) not in epochs


def test_the_order_follows_from_the_seed_and_stays_the_same_for_good() -> None:
    assert numbers(stream().chunk(0, 20)) == numbers(stream().chunk(0, 20)) != numbers(stream(seed=2).chunk(0, 20))
    assert numbers(stream(seed=9, shuffle_seed=1).chunk(0, 20)) == numbers(stream(seed=1).chunk(0, 20))
    assert numbers(stream().chunk(0, 20)) == [2, 9, 8, 3, 6, 7, 1, 4, 0, 5, 0, 6, 2, 7, 9, 8, 3, 1, 4, 5]


def test_chunks_join_across_epochs() -> None:
    source, whole = stream(7, epochs=3), numbers(stream(7, epochs=3).chunk(0, 99))
    parts = [numbers(source.chunk(position, 4)) for position in range(0, 24, 4)]
    assert [number for part in parts for number in part] == whole and len(whole) == 21
    assert source.chunk(21, 4) == [] and source.num_prompts == 21
    endless = stream(7, epochs=0)
    assert endless.num_prompts is None and len(endless.chunk(10**6, 4)) == 4


def test_without_shuffling_the_file_order_holds() -> None:
    assert numbers(stream(4, shuffle=False).chunk(0, 8)) == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("seed", [1, -1, 20261115120000, 2**80])
def test_every_sample_draws_with_a_seed_of_its_own(seed: int) -> None:
    prompts = stream(10, seed, epochs=2).chunk(0, 20)
    assert [decode_prompt(encode_prompt(prompt)) for prompt in prompts] == prompts
    seeds = [prompt.sampling.seed for prompt in prompts]
    assert min(first for first in seeds if first is not None) >= 0
    taken = [seed + i for seed in seeds if seed is not None for i in range(4)]
    assert len(set(taken)) == 80


def test_the_fingerprint_is_of_data_and_order() -> None:
    assert stream().fingerprint == stream(epochs=9, temperature=0.5, max_pending=3).fingerprint
    others = [stream(11), stream(seed=2), stream(shuffle=False), stream(shuffle_seed=5)]
    assert len({other.fingerprint for other in [stream(), *others]}) == 5


def test_a_config_names_its_dataset(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pattern"):
        DatasetConfig(name="a:b")


def test_a_weight_says_how_often_an_epoch_has_a_row() -> None:
    prompts = [Prompt(messages=(("user", str(i)),), num_samples=4, sampling=Sampling()) for i in range(12)]
    config = DatasetConfig(epochs=4)
    weighted = PromptStream(prompts, config, 1, [(2, 2.0), (8, 0.25), (2, 1.0)])
    assert (weighted.epoch_prompts, weighted.num_prompts) == (8, 32)
    epochs = [numbers(weighted.chunk(8 * epoch, 8)) for epoch in range(4)]
    for epoch in epochs:
        assert [epoch.count(row) for row in (0, 1, 10, 11)] == [2, 2, 1, 1]
    drawn = [row for epoch in epochs for row in epoch if 2 <= row < 10]
    assert sorted(drawn) == list(range(2, 10)), "each epoch has another quarter of the rows"
    assert weighted.fingerprint != PromptStream(prompts, config, 1).fingerprint


def config_of(folder: Path, *files: Any) -> RunConfig:
    return RunConfig.model_validate({"run": "r", "model": {"path": str(folder)}, "dataset": {"file": list(files)}})


def test_a_weight_that_leaves_nothing_of_a_file_is_refused(tmp_path: Path) -> None:
    small, empty = tmp_path / "small.jsonl", tmp_path / "empty.jsonl"
    small.write_text('{"prompt": "a"}\n' * 3)
    empty.touch()
    with pytest.raises(InvalidInput, match=r"weight 0\.1 leaves none of a file's 3 rows"):
        PromptStream.read(config_of(tmp_path, {"file": str(small), "weight": 0.1}))
    weighted = PromptStream.read(config_of(tmp_path, {"file": str(small), "weight": 2}, str(empty)))
    assert len(weighted.chunk(0, 10)) == weighted.epoch_prompts == 6
