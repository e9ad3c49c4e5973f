"""The thread that writes trained samples: what it writes, and that it cannot delay training."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.codec import encode_prompt
from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.samples import NEWEST, Sample, SampleFile, SampleFilter, TokenText, select
from penstock.trajectory import Group, Prompt, VersionSegment
from penstock_learner.loggers.samples import MAX_GROUND_TRUTH, MAX_WAITING, SampleLog, TrainedStep, spread
from penstock_learner.loggers.step_loggers import StepLoggers
from support.groups import make_group
from support.scripted_engines import END, make_tokenizer_folder, spelled


class CollectingLoggers(StepLoggers):
    def __init__(self) -> None:
        super().__init__([])
        self.tables: list[tuple[int, list[Sample]]] = []

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self.tables.append((step, list(samples)))


def config_of(folder: Path, **samples: Any) -> RunConfig:
    make_tokenizer_folder(folder / "model")
    data = {"run": "r", "run_dir": str(folder), "model": {"path": str(folder / "model")}}
    return validate(data | {"learner": {"samples": samples}}, "test")


def group_saying(prompt_id: int, *texts: str) -> Group:
    group = make_group(prompt_id)
    ids = [np.array([*spelled(text), END], dtype=np.int32) for text in texts]
    trajectories = tuple(
        replace(
            group.trajectories[0], token_ids=own, loss_mask=np.ones(len(own), np.uint8),
            log_probs=np.zeros(len(own), np.float32), segments=(VersionSegment(0, len(own), 4),),
            reward_parts={"format": float("nan"), "answer": 0.5},
        )
        for own in ids
    )  # fmt: skip
    return replace(group, prompt_token_ids=np.array([END, *spelled("ask")], np.int32), trajectories=trajectories)


def step_of(step: int, *groups: Group, prompts: dict[int, bytes] | None = None, **changes: Any) -> TrainedStep:
    rewards = np.arange(sum(len(group.trajectories) for group in groups), dtype=np.float32) / 10
    known = {group.prompt_id: encode_prompt(Prompt(token_ids=(1,), ground_truth="5")) for group in groups}
    made = TrainedStep(step, step + 100, groups, known if prompts is None else prompts, rewards)
    return replace(made, **changes)


def written(config: RunConfig) -> list[Sample]:
    return select(config.folder, SampleFilter(), 1000)


def test_a_step_is_written_as_text(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    log = SampleLog(config, 0, CollectingLoggers())
    log.add(step_of(3, group_saying(1, "abc", "b"), group_saying(2, "a")))
    log.close(120)
    second, first, other = written(config)
    assert (first.response, other.response, second.response) == ("abc", "b", "a")
    assert first.prompt.endswith("ask") and first.prompt.startswith("<|"), "special tokens of the prompt are shown"
    assert [sample.reward for sample in (first, other, second)] == [0.0, 0.1, 0.2], "as trained, not as the server said"
    assert first.reward_parts == {"format": None, "answer": 0.5}
    assert (first.step, first.policy_version, first.prompt_id, first.ground_truth) == (3, 103, 1, "5")
    assert (first.min_version, first.max_version, first.num_tokens) == (4, 4, 4)


def test_only_groups_whose_prompt_was_read_are_written_and_a_long_truth_is_cut(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    long = encode_prompt(Prompt(token_ids=(1,), ground_truth={"tests": ["x" * 10_000]}))
    log = SampleLog(config, 0, CollectingLoggers())
    groups = (group_saying(1, "a"), group_saying(2, "b", "c"), group_saying(3, "ab"))
    log.add(step_of(1, *groups, prompts={2: long, 3: b""}))
    log.close(120)
    assert [(sample.prompt_id, sample.reward) for sample in written(config)] == [(3, 0.3), (2, 0.1), (2, 0.2)]
    assert written(config)[0].ground_truth is None
    assert len(written(config)[1].ground_truth) == MAX_GROUND_TRUTH + 2


def test_no_samples_are_written_with_a_share_of_zero(tmp_path: Path) -> None:
    config = config_of(tmp_path, share=0)
    log = SampleLog(config, 0, CollectingLoggers())
    log.add(step_of(1, group_saying(1, "a")))
    log.close(120)
    assert not (config.folder / NEWEST).exists()


def test_a_slow_writer_skips_steps_instead_of_delaying_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released, reading = threading.Event(), TokenText.load

    def slow(path: Path) -> TokenText:
        released.wait(60)
        return reading(path)

    monkeypatch.setattr(TokenText, "load", slow)
    config = config_of(tmp_path)
    log = SampleLog(config, 0, CollectingLoggers())
    for step in range(1, MAX_WAITING + 4):
        log.add(step_of(step, group_saying(step, "a")))  # returns at once
    released.set()
    log.close(120)
    assert [sample.step for sample in written(config)] == list(range(MAX_WAITING, 0, -1))
    [warning] = [message for message in caplog.messages if "missing in samples.jsonl" in message]
    assert f"steps from {MAX_WAITING + 1} on" in warning


def test_a_full_disk_is_logged_once_and_writing_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    appending, failures = SampleFile._append, iter(range(4))

    def append(file: SampleFile, text: str) -> None:
        if next(failures, None) is not None:  # at the start, and for steps 1 to 3
            raise OSError(28, "No space left on device")
        appending(file, text)

    monkeypatch.setattr(SampleFile, "_append", append)
    config = config_of(tmp_path)
    log = SampleLog(config, 0, CollectingLoggers())
    for step in range(1, 5):
        log.add(step_of(step, group_saying(step, "a")))
    log.close(120)
    assert [sample.step for sample in written(config)] == [4]
    assert len([message for message in caplog.messages if "No space left" in message]) == 1


def test_tables_have_the_worst_the_best_and_some_between(tmp_path: Path) -> None:
    config, loggers = config_of(tmp_path, table_every_steps=2, table_rows=3), CollectingLoggers()
    log = SampleLog(config, 0, loggers)
    for step in (1, 2, 3, 4):
        log.add(step_of(step, group_saying(step, *"abcab")))
    log.close(120)
    assert [step for step, _ in loggers.tables] == [2, 4]
    assert [sample.reward for sample in loggers.tables[0][1]] == [0.0, 0.2, 0.4]
    assert spread(loggers.tables[0][1], 1) == loggers.tables[0][1][:1]
