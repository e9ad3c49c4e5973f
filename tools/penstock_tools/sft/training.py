"""Supervised fine-tuning with the learner's own packed FSDP2 model, without Ray: each process is a rank.

`penstock sft` runs one rank. `torchrun --nproc-per-node N -m penstock.cli.main sft …` runs N, which share the batches.
Model, optimizer, schedule, precision, adapter, checkpoints and loggers come from the run's config.

The rows of a step follow from the seed and the number of the step alone. So a training that is continued from a
checkpoint takes exactly the steps that it would have taken, and ends with the same weights.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from penstock.config.learner import SftConfig
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, InvalidInput
from penstock.feed.dataset_feed import EpochOrder, require_drawn
from penstock.feed.datasets import shown_files
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.loggers.step_loggers import StepLoggers, check_loggers, open_loggers
from penstock_tools.export import export
from penstock_tools.sft.checkpoints import SupervisedCheckpoints
from penstock_tools.sft.data import ExampleReader, Examples, Row, batch_of_examples
from penstock_tools.sft.rank import SupervisedRank

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stopped:
    """A training that was told to stop. It continues from its checkpoint."""

    step: int
    checkpoint: Path


def fine_tune(config: RunConfig, out: Path) -> Stopped | None:
    """Train on the rows of `sft.file` and write the model, or its adapter, to the folder `out`.

    Checkpoints and metrics are in `OUT.training`, which stays."""
    check_loggers(config.learner.loggers)
    plan = make_plan(config)
    learner = config.learner.model_copy(update={"num_steps": plan.num_steps, "ray_address": ""})
    config = config.model_copy(update={"learner": learner})
    rank = SupervisedRank(config)
    try:
        if rank.rank == 0:
            logger.info("training: %s", plan)
        with StopSignal() as stop:
            outcome = SupervisedTraining(config, plan, rank, out).run(stop)
    finally:
        dist.destroy_process_group()
    if isinstance(outcome, Stopped):
        return outcome
    if rank.rank == 0:
        is_adapter = learner.lora is not None and config.sft.output == "adapter"
        del rank
        export(config, outcome, out, config.model.dtype, adapter=is_adapter)
    return None


@dataclass(frozen=True)
class Plan:
    """The rows, and which of them each step trains."""

    sft: SftConfig
    training: Examples
    held_out: Examples | None
    order: EpochOrder

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.order.num_rows, self.sft.batch_size)
        return whole + (rest > 0 and self.sft.last_batch == "train")

    @property
    def num_steps(self) -> int:
        return self.sft.epochs * self.steps_per_epoch

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides which rows a step trains."""
        order = (self.order.shuffle, self.order.seed, self.sft.batch_size, self.sft.last_batch)
        return hashlib.sha256(repr((self.training.fingerprint, order)).encode()).hexdigest()

    def batch(self, step: int) -> SequenceBatch:
        """The batch of a step. The first step is 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.sft.batch_size
        chosen = self.order.rows(epoch)[first : first + self.sft.batch_size]
        return _batch([self.training.rows[index] for index in chosen.tolist()])

    def held_out_batches(self) -> Iterator[SequenceBatch]:
        rows = [] if self.held_out is None else self.held_out.rows
        for first in range(0, len(rows), self.sft.batch_size):
            yield _batch(rows[first : first + self.sft.batch_size])

    def __str__(self) -> str:
        held_out = "" if self.held_out is None else f" Held out: {self.held_out}."
        return f"{self.training}. {self.num_steps} steps in {self.sft.epochs} epochs.{held_out}"


def make_plan(config: RunConfig) -> Plan:
    """Read the files. Raises ConfigError or InvalidInput if they cannot be trained on as the config says."""
    from transformers import AutoConfig, AutoTokenizer

    sft = config.sft
    if sft.file is None:
        raise ConfigError("there is no data to train on; give --data, or set sft.file")
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(f"model.path {config.model.path} is not a model folder (no config.json)")
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    described = AutoConfig.from_pretrained(config.model.path, local_files_only=True).get_text_config()
    reader = ExampleReader(config, tokenizer, getattr(described, "max_position_embeddings", None))
    training = reader.read(sft.file)
    held_out = None if sft.validation.file is None else reader.read(sft.validation.file)
    require_drawn(training.parts, shown_files(sft.file))
    order = EpochOrder(training.parts, shuffle=sft.shuffle, seed=config.seed % 2**32)
    plan = Plan(sft, training, held_out, order)
    _require_steps(config, plan)
    return plan


class SupervisedTraining:
    """The loop of steps, validations and checkpoints of one rank."""

    def __init__(self, config: RunConfig, plan: Plan, rank: SupervisedRank, out: Path) -> None:
        self.config = config
        self.plan = plan
        self.rank = rank
        self.folder = training_folder(out)
        self.checkpoints = SupervisedCheckpoints(
            self.folder / "checkpoints", config.learner.checkpoint, rank, plan.fingerprint
        )

    def run(self, stop: StopSignal) -> Path | Stopped:
        """Train to the last step. Returns the last checkpoint. If a signal comes, a checkpoint is written first."""
        self.rank.load()
        done = self.checkpoints.restore()
        loggers = self._open_loggers(done)
        try:
            return self._run(done, stop, loggers)
        finally:
            if loggers is not None:
                loggers.close()

    def _run(self, done: int, stop: StopSignal, loggers: StepLoggers | None) -> Path | Stopped:
        checkpoint, num_steps = None, self.plan.num_steps
        if done == 0 and self.plan.sft.validation.before_train and self.plan.held_out is not None:
            self._log(loggers, {"step": 0, "val/loss": self._validate()})
        while done < num_steps:
            started = time.monotonic()
            report = self.rank.step(self.plan.batch(done), done)
            done += 1
            numbers = {
                "step": done,
                "epoch": done / self.plan.steps_per_epoch,
                "train/loss": report.loss,
                "train/lr": report.lr,
                "train/grad_norm": report.grad_norm,
                "train/trained_tokens": report.num_trained,
                "timing_s/step": time.monotonic() - started,
            }
            if self._is_due(self.plan.sft.validation.every_steps, done) and self.plan.held_out is not None:
                numbers["val/loss"] = self._validate()
            self._log(loggers, numbers)
            is_told = self.rank.agree(stop.is_set)
            if is_told or self._is_due(self.config.learner.checkpoint.every_steps, done):
                checkpoint = self.checkpoints.save(done)
            if is_told and done < num_steps:
                assert checkpoint is not None
                return Stopped(done, checkpoint)
        return checkpoint or self.checkpoints.save(done)

    def _is_due(self, every_steps: int, done: int) -> bool:
        return done % every_steps == 0 or done == self.plan.num_steps

    def _validate(self) -> float:
        return self.rank.mean_loss(self.plan.held_out_batches())

    def _open_loggers(self, done: int) -> StepLoggers | None:
        """Only rank 0 has loggers. They write to the folder of the training."""
        if self.rank.rank != 0:
            return None
        place = {"run_dir": self.folder.parent, "run": self.folder.name}
        self.folder.mkdir(parents=True, exist_ok=True)
        return open_loggers(self.config.model_copy(update=place), done)

    def _log(self, loggers: StepLoggers | None, numbers: dict[str, float]) -> None:
        if loggers is None:
            return
        loggers.log({**numbers, "time": time.time()})
        shown = "  ".join(f"{name} {numbers[name]:.4f}" for name in ("train/loss", "val/loss") if name in numbers)
        logger.info("step %d of %d  %s", numbers["step"], self.plan.num_steps, shown)


class StopSignal:
    """Notes that SIGTERM or SIGINT came. A second one has its usual effect."""

    def __init__(self) -> None:
        self.is_set = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        signal.signal(number, self._before[number])
        logger.warning("signal %d: a checkpoint is written after this step, and the training ends", number)


def training_folder(out: Path) -> Path:
    """Where the checkpoints and metrics of a training are that will write `out`."""
    return out.with_name(f"{out.name}.training")


def _batch(rows: Sequence[Row]) -> SequenceBatch:
    return batch_of_examples([example for row in rows for example in row])


def _require_steps(config: RunConfig, plan: Plan) -> None:
    """Raise an error in one line if the files are too small for the batch or the schedule."""
    learner, files = config.learner, shown_files(config.sft.file or ())
    if plan.num_steps == 0:
        raise InvalidInput(
            files,
            f"has {plan.order.num_rows} rows, less than one batch of {config.sft.batch_size}; lower --batch-size, or "
            "set sft.last_batch to train",
        )
    if learner.warmup_steps >= plan.num_steps and learner.lr_schedule != "constant":
        raise ConfigError(
            f"{files} gives {plan.num_steps} steps, which are not more than learner.warmup_steps "
            f"({learner.warmup_steps}); lower it, raise --epochs, or set learner.lr_schedule to constant"
        )
