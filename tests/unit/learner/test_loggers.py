"""The loggers: what each writes, and that none can delay or end training."""

from __future__ import annotations

import io
import json
import math
import re
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.samples import Sample
from penstock_learner.loggers.step_loggers import (
    MAX_WAITING,
    ConsoleLogger,
    LoggerThread,
    StepLoggers,
    check_loggers,
    open_loggers,
    under_verl_names,
)


def make_config(folder: Path, *loggers: str, **learner: Any) -> RunConfig:
    settings = {"loggers": list(loggers), **learner}
    data = {"run": "logged", "run_dir": str(folder), "model": {"path": "none"}, "learner": settings}
    data["redis"] = {"url": "redis://:secret@localhost:1"}
    return validate(data, "test")


def metrics_of(step: int, **more: float) -> dict[str, float]:
    return {
        "step": float(step), "time": 1000.0 + step, "loss": 0.5 * step, "step_s": 2.0, "num_sequences": 4.0,
        "prompt_tokens": 24.0, "response_tokens": 16.0, "clip_ratio_low": 0.25, "clip_ratio_high": 0.5,
        "staleness_mean": 1.5, "staleness_max": 3.0, "reward_mean": 0.5, "reward_min": 0.0, "reward_max": 1.0,
        "wait_s": 0.5, "update_s": 1.0, "num_gpus": 2.0, **more,
    }  # fmt: skip


def written(config: RunConfig, *steps: int, start_step: int = 0) -> None:
    loggers = open_loggers(config, start_step)
    for step in steps:
        loggers.log(metrics_of(step))
    loggers.close(120)


def test_numbers_go_under_verls_names() -> None:
    named = under_verl_names(
        metrics_of(3, critic_loss=7.0, truncated_ratio=0.25, memory_peak_gib=80.0, prompt_length_max=9.0)
    )
    assert named == {
        "training/global_step": 3, "actor/pg_loss": 1.5, "critic/vf_loss": 7, "timing_s/step": 2,
        "critic/rewards/mean": 0.5, "critic/rewards/min": 0, "critic/rewards/max": 1, "perf/time_per_step": 2,
        "critic/score/mean": 0.5, "critic/score/min": 0, "critic/score/max": 1, "response_length/clip_ratio": 0.25,
        "perf/max_memory_allocated_gb": 80, "actor/pg_clipfrac": 0.75, "prompt_length/max": 9,
        "perf/total_num_tokens": 40, "perf/throughput": 10, "timing_s/gen": 0.5, "timing_per_token_ms/gen": 31.25,
        "timing_s/update_actor": 1, "timing_per_token_ms/update_actor": 25, "penstock/staleness_max": 3,
        "training/off_policy/trajectory_staleness_worst/max": 3, "penstock/num_gpus": 2,
        "penstock/staleness_mean": 1.5, "penstock/num_sequences": 4, "penstock/prompt_tokens": 24,
        "penstock/response_tokens": 16, "penstock/clip_ratio_low": 0.25, "penstock/clip_ratio_high": 0.5,
    }  # fmt: skip


def test_returns_are_the_advantages_of_an_estimator_without_returns() -> None:
    advantages = {"advantage_mean": 0.5, "advantage_min": -1.0, "advantage_max": 2.0}
    named = under_verl_names(metrics_of(3, **advantages))
    assert [named[f"critic/returns/{kind}"] for kind in ("mean", "min", "max")] == [0.5, -1, 2]
    named = under_verl_names(metrics_of(3, **advantages, return_mean=7.0))
    assert (named["critic/returns/mean"], named["critic/advantages/mean"]) == (7, 0.5)


def test_jsonl_drops_what_comes_again_after_a_resume(tmp_path: Path) -> None:
    config = make_config(tmp_path, "jsonl")
    written(config, 1, 2, 3)
    written(config, 3, 4, start_step=2)
    rows = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == [metrics_of(step) for step in (1, 2, 3, 4)]


def test_jsonl_keeps_whole_timestamps_and_counts(tmp_path: Path) -> None:
    config = make_config(tmp_path, "jsonl")
    loggers = open_loggers(config, 0)
    loggers.log(metrics_of(1) | {"time": 1_794_812_345.678, "response_tokens": 33_554_433.0, "loss": 0.1 + 0.2})
    loggers.close(120)
    row = json.loads((config.folder / "metrics.jsonl").read_text())
    assert (row["time"], row["response_tokens"], row["loss"]) == (1_794_812_345.678, 33_554_433, 0.3)


def test_jsonl_stays_json_where_a_step_was_skipped(tmp_path: Path) -> None:
    config = make_config(tmp_path, "jsonl")
    loggers = open_loggers(config, 0)
    loggers.log(metrics_of(1, grad_norm=math.inf, kl_reference=math.nan))
    loggers.close(120)
    assert '"grad_norm": null, "kl_reference": null' in (config.folder / "metrics.jsonl").read_text()


def test_tensorboard_reads_the_events_and_purges_what_comes_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_config(tmp_path, "tensorboard")
    written(config, 1, 2, 3)
    written(config, 3, 4, start_step=2)
    events = EventAccumulator(str(config.folder / "tensorboard"))
    events.Reload()
    losses = events.Scalars("actor/pg_loss")
    assert [event.step for event in losses] == [1, 2, 3, 4]
    assert [event.value for event in losses] == [0.5, 1, 1.5, 2]
    assert losses[0].wall_time == 1001
    assert "training/global_step" in events.Tags()["scalars"]


SAMPLE = Sample(
    step=10, policy_version=10, prompt_id=7, sample=1, data_source="sums", prompt="# 2 + 3?", ground_truth={"sum": 5},
    response="<b>5</b>\n| 5 |", reward=1.0, reward_parts={"format": 0.5, "broken": None}, num_tokens=6, min_version=8,
    max_version=9, finish_reason="stop", is_baseline=False, server_id="rollout-0", agent_name="a", attempt=1,
    finished_at_ms=1,
)  # fmt: skip


def test_tensorboard_has_samples_as_text_and_validations_at_their_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_config(tmp_path, "tensorboard")
    loggers = open_loggers(config, 0)
    loggers.log_samples(10, [SAMPLE, SAMPLE])
    loggers.log_samples(8, [replace(SAMPLE, validation="math")])
    loggers.log_validation(8, {"val-core/heldout/score": 0.25})
    loggers.close(120)
    events = EventAccumulator(str(config.folder / "tensorboard"))
    events.Reload()
    [written] = events.Tensors("samples/text_summary")
    text = written.tensor_proto.string_val[0].decode()
    assert written.step == 10 and text.count("**reward 1** · format 0.5 · prompt 7.1 · 6 tokens") == 2
    assert "    # 2 + 3?" in text and "    <b>5</b>\n    | 5 |" in text, "no text is read as Markdown"
    assert [each.step for each in events.Tensors("validation_samples/text_summary")] == [8]
    [score] = events.Scalars("val-core/heldout/score")
    assert (score.step, score.value) == (8, 0.25)


class StandInRun:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.is_finished = False
        self.step_metrics: dict[str, str | None] = {}

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert (step is not None) != (commit is False) and not self.is_finished
        self.logged.append((self.logged[-1][0] if step is None else step, data))

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.step_metrics[name] = step_metric

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        self.is_finished = True


class StandInWandb(ModuleType):
    """The functions of W&B that we call, with its signatures."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run = StandInRun()
        self.options: dict[str, Any] = {}

    def init(
        self, entity: str | None = None, project: str | None = None, dir: str | None = None, id: str | None = None,
        name: str | None = None, config: dict[str, Any] | str | None = None, mode: str | None = None,
        resume: bool | str | None = None,
    ) -> StandInRun:  # fmt: skip
        assert mode in ("online", "offline", "disabled", "shared") and resume in ("allow", "never", "must", "auto")
        self.options = {"entity": entity, "project": project, "dir": dir, "id": id, "config": config, "mode": mode}
        return self.run


def test_wandb_gets_steps_and_settings_but_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = StandInWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = make_config(tmp_path, "wandb", wandb={"project": "sums", "mode": "offline"}, lr=0.25)
    written(config, 1, 2)
    assert [(step, data["actor/pg_loss"]) for step, data in wandb.run.logged] == [(1, 0.5), (2, 1.0)]
    assert wandb.run.is_finished
    sent = wandb.options.pop("config")
    assert wandb.options == {
        "entity": None, "project": "sums", "dir": str(config.folder), "id": "logged", "mode": "offline"
    }  # fmt: skip
    assert sent["learner"]["lr"] == 0.25 and "secret" not in json.dumps(sent)


class StandInTable:
    def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
        assert all(len(row) == len(columns) for row in data)
        self.rows = [dict(zip(columns, row, strict=True)) for row in data]


def test_wandb_gets_samples_as_a_table_and_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = StandInWandb()
    wandb.Table = StandInTable  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    loggers = open_loggers(make_config(tmp_path, "wandb"), 0)
    loggers.log(metrics_of(10))
    loggers.log_samples(10, [SAMPLE])
    loggers.log_samples(8, [replace(SAMPLE, validation="math")])
    loggers.log_validation(8, {"val-core/heldout/score": 0.25})
    loggers.close(120)
    (_, steps), (step, table), (_, validated), (_, validation) = wandb.run.logged
    assert validated.keys() == {"validation_samples"}
    assert "actor/pg_loss" in steps and step == 10
    [row] = table["samples"].rows
    assert (row["prompt"], row["response"], row["reward"]) == ("# 2 + 3?", "<b>5</b>\n| 5 |", 1.0)
    assert (row["ground_truth"], row["prompt_id"]) == ('{"sum": 5}', 7)
    assert validation == {"val-core/step": 8, "val-core/heldout/score": 0.25}
    assert wandb.run.step_metrics == {"val-core/*": "val-core/step"}


@pytest.mark.filterwarnings("ignore")
def test_the_real_wandb_writes_an_offline_run(tmp_path: Path) -> None:
    """Needs the package. Its file is a LevelDB log of protobuf records."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    config = make_config(tmp_path, "wandb", wandb={"project": "sums", "mode": "offline"})
    loggers = open_loggers(config, 0)
    for step in (1, 2):
        loggers.log(metrics_of(step))
        loggers.log_samples(step, [SAMPLE, replace(SAMPLE, ground_truth=None, reward=None)])
    loggers.close(120)
    assert list(config.folder.glob("wandb/offline-run-*/files/media/table/samples_*.table.json"))
    (path,) = config.folder.glob("wandb/offline-run-*/run-logged.wandb")
    losses = {}
    for record in leveldb_records(path.read_bytes()):
        history = wandb_internal_pb2.Record.FromString(record).history
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
        if "actor/pg_loss" in values:
            losses[history.step.num] = values["actor/pg_loss"]
    assert losses == {1: 0.5, 2: 1.0}


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """Read a LevelDB log. It has blocks of 32 KiB. Each part of a record has a checksum, a length and a kind (whole,
    first, middle, last)."""
    whole, first, last = 1, 2, 4
    at, joined = 7, b""  # after W&B's own header
    while at + 7 <= len(log):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack_from("<HB", log, at + 4)
        part, at = log[at + 7 : at + 7 + length], at + 7 + length
        joined = part if kind in (whole, first) else joined + part
        if kind in (whole, last):
            yield joined


def test_the_console_shows_a_step_by_groups() -> None:
    screen = io.StringIO()
    ConsoleLogger(Console(file=screen, width=200)).log(metrics_of(3))
    lines = screen.getvalue().splitlines()
    assert lines[0].strip() == "step 3"
    assert any(re.match(r"actor +pg_clipfrac 0.75  pg_loss 1.5", line) for line in lines)


class Collecting:
    def __init__(self) -> None:
        self.steps: list[float] = []

    def log(self, metrics: Mapping[str, float]) -> None:
        self.steps.append(metrics["step"])

    def close(self) -> None:
        self.steps.append(-1)


class Failing(Collecting):
    def log(self, metrics: Mapping[str, float]) -> None:
        super().log(metrics)
        raise ConnectionError("no such server")


class Hanging(Collecting):
    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def log(self, metrics: Mapping[str, float]) -> None:
        self.released.wait(60)


def test_a_logger_that_fails_or_hangs_is_dropped_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    good, failing, hanging = Collecting(), Failing(), Hanging()

    def no_opening() -> Collecting:
        raise OSError("disk full")

    made = {"good": lambda: good, "failing": lambda: failing, "hanging": lambda: hanging, "unopened": no_opening}
    threads = [LoggerThread(name, make) for name, make in made.items()]
    loggers = StepLoggers(threads)
    num_steps = MAX_WAITING + 10
    try:
        for step in range(num_steps):
            loggers.log(metrics_of(step))
            while len(good.steps) <= step:  # it is fast, as a file is
                time.sleep(0)
        loggers.close(timeout_s=0.2)
        for each in threads:
            if each.name != "hanging":
                each.thread.join(60)  # on a busy machine another one may not have ended by then either
    finally:
        hanging.released.set()
    assert good.steps == [*range(num_steps), -1]
    assert failing.steps == [0]
    for name in ("failing", "hanging", "unopened"):
        gone = [
            message for message in caplog.messages if f"logger {name} " in message and "training continues" in message
        ]
        assert len(gone) == 1
    assert any("logger hanging did not end" in message for message in caplog.messages)


def test_a_missing_package_is_named_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_loggers(["console", "jsonl"])
    with pytest.raises(ConfigError, match=r"learner\.loggers has wandb, .*pip install wandb$"):
        check_loggers(["jsonl", "wandb"])


def test_an_unknown_logger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.loggers"):
        make_config(tmp_path, "papyrus")
