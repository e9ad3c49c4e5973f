"""The text of a validation on its way from an engine through Redis to the files and the loggers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.cancellation import end_task
from penstock.cli.main import main
from penstock.config.loading import validate
from penstock.feed.validation import Validator
from penstock.replay.queue import RedisReplayQueue
from penstock.samples import VALIDATED, Sample, SampleFilter, select
from penstock_learner.loggers.samples import SampleLog
from penstock_learner.loggers.step_loggers import StepLoggers
from penstock_learner.loggers.validations import ValidationGroups
from penstock_rollout.agents.loops import Agents
from penstock_rollout.groups.producer import GroupMaker, Producer
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.tokenization import Tokenization
from support.scripted_engines import TalkingEngine, make_tokenizer_folder


class CollectingLoggers(StepLoggers):
    def __init__(self) -> None:
        super().__init__([])
        self.tables: list[tuple[int, list[Sample]]] = []

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self.tables.append((step, list(samples)))


async def test_the_first_prompts_of_each_validation_are_kept_as_text(
    tmp_path: Path, queue: RedisReplayQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    queue.config = queue.config.model_copy(update={"lease_ttl_s": 600.0})  # nothing renews the leases here
    heldout = tmp_path / "heldout.jsonl"
    rows = [{"prompt": "ab?", "reward_model": {"ground_truth": truth}} for truth in ("abc ok", "5", "6", "7")]
    heldout.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_tokenizer_folder(tmp_path / "model")
    config = validate(
        {
            "run": "test", "run_dir": str(tmp_path), "model": {"path": str(model)},
            "rollout": {"reward": {"num_processes": 1}},
            "dataset": {"validation": {"file": str(heldout), "num_samples": 2}},
            "learner": {"samples": {"share": 0, "validation_samples": 3}},
        },
        "test",
    )  # fmt: skip
    tokenization, metrics, engine = Tokenization(model), RolloutMetrics(CollectorRegistry()), TalkingEngine()
    scorer, agents = Scorer(config.rollout.reward, metrics), Agents.load(config.rollout.agents, 64, tokenization)
    stand_in: Any = engine
    producer = Producer(
        queue, "rollout-0", GroupMaker("test", "rollout-0", stand_in, tokenization, scorer, metrics, agents),
        config.rollout, config.replay, metrics, may_lease=lambda: True, validation_samples=3,
    )  # fmt: skip
    loggers = CollectingLoggers()
    groups = ValidationGroups(queue, SampleLog(config, 0, loggers), 1)
    leasing = asyncio.create_task(producer.lease_loop())
    try:
        async with asyncio.timeout(240):
            for step in (0, 10):
                engine.policy_version = step + 1
                await Validator.read(config, queue).validate(step)
                name = f"validation-train-{step}"
                assert len((await queue.kept_groups(name)).prompt_ids) == 2, "two samples each: three need two prompts"
                await groups.read_new()
                await groups.read_new()
                assert (await queue.kept_groups(name)).prompt_ids == ()
                assert not await queue.client.exists(queue.keys.evaluation_groups(name))
    finally:
        await end_task(leasing)
        await scorer.close()
    assert not (config.folder / "samples.jsonl").exists()
    found = select(config.folder / VALIDATED, SampleFilter(), 100)
    assert [(sample.step, sample.sample, sample.reward) for sample in found] == [
        (10, 0, 0.0), (10, 1, 0.0), (10, 0, 1.0), (10, 1, 1.0), (0, 0, 0.0), (0, 1, 0.0), (0, 0, 1.0), (0, 1, 1.0),
    ]  # fmt: skip
    assert {(sample.validation, sample.response, sample.owner) for sample in found} == {("train", "abc ok", "")}
    assert [sample.ground_truth for sample in found[:4]] == ["5", "5", "abc ok", "abc ok"]
    assert "ab?" in found[0].prompt and found[0].policy_version == 11
    assert [(step, len(samples)) for step, samples in loggers.tables] == [(0, 4), (10, 4)]
    assert main(["samples", "--validation", "--step", "10", "--run-dir", str(config.folder), "--best"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("reward 1") and "validation  step 10" in shown and "step 0" not in shown
