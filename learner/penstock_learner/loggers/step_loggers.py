"""Runs each logger of a run in a separate thread, so that none can delay or end training.

    controller ─ log(metrics) ─► queue of MAX_WAITING calls ─► thread: open, log, log, …, close

If a logger raises an error, the error is logged once and the logger gets no more steps. If a logger hangs, it gets no
more steps once its queue is full. When the run ends, the controller waits for the loggers until a deadline.

To add a logger, write a class in `backends.py`, and add its name to `penstock/config/learner.py` and to `_open`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Protocol

from penstock.config.learner import LoggerName
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.samples import Sample

logger = logging.getLogger(__name__)


class StepLogger(Protocol):
    """A logger is made, called and closed in one separate thread, so it may be slow. An error ends only the logger.

    It is made for the steps after `resume_step`. An earlier logger of the run may have logged some of these steps
    already."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write the numbers of one step, under the learner's own names. `step` is one of them."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write some samples of a step, the worst first. `samples.jsonl` has all of them."""

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Write the scores of validations that are finished, under verl's names. `step` is the step that they scored,
        which may be some steps ago."""

    def close(self) -> None:
        """Called when no step follows."""


MAX_WAITING = 1000
CLOSE_S = 10.0
"""How long all loggers together may take to write their last steps."""
NEEDED_PACKAGES: dict[LoggerName, str] = {"tensorboard": "tensorboard", "wandb": "wandb"}


def check_loggers(names: Sequence[LoggerName]) -> None:
    """Raise ConfigError if a logger's package is not installed. Does not import the packages."""
    for name in names:
        package = NEEDED_PACKAGES.get(name)
        if package is not None and find_spec(package) is None:
            raise ConfigError(f"learner.loggers has {name}, which needs a package: pip install {package}")


def open_loggers(config: RunConfig, resume_step: int) -> StepLoggers:
    """Start the loggers of `learner.loggers`, for the steps after `resume_step`."""
    names = dict.fromkeys(config.learner.loggers)
    return StepLoggers([LoggerThread(name, partial(_open, name, config, resume_step)) for name in names])


class LoggerThread:
    """One logger and its thread. `make_logger` runs in the thread too, because it may call a server that does not
    answer."""

    def __init__(self, name: str, make_logger: Callable[[], StepLogger]) -> None:
        self.name = name
        self.make_logger = make_logger
        self.waiting: queue.Queue[Callable[[StepLogger], None] | None] = queue.Queue(MAX_WAITING)
        self.is_dropped = False
        self.thread = threading.Thread(target=self._run, name=f"logger-{name}", daemon=True)

    def call(self, call: Callable[[StepLogger], None] | None) -> None:
        """Queue a call of the logger, without waiting. None means that none follows."""
        if self.is_dropped:
            return
        try:
            self.waiting.put_nowait(call)
        except queue.Full:
            self.is_dropped = True
            logger.error(
                "logger %s is %d steps behind and gets no more steps; training continues", self.name, MAX_WAITING
            )

    def _run(self) -> None:
        try:
            opened = self.make_logger()
            while (call := self.waiting.get()) is not None:
                call(opened)
            opened.close()
        except Exception as error:  # a third party's package may raise anything
            self.is_dropped = True
            logger.error("logger %s failed and gets no more steps; training continues: %r", self.name, error)


class StepLoggers:
    """Sends the numbers of each step, tables of samples, and scores of validations to every logger."""

    def __init__(self, threads: Sequence[LoggerThread]) -> None:
        self.threads = threads
        for each in threads:
            each.thread.start()

    def log(self, metrics: Mapping[str, float]) -> None:
        copy = dict(metrics)
        self._call(lambda opened: opened.log(copy))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._call(lambda opened: opened.log_samples(step, samples))

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        self._call(lambda opened: opened.log_validation(step, scores))

    def _call(self, call: Callable[[StepLogger], None] | None) -> None:
        for each in self.threads:
            each.call(call)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until all loggers have written their last step, or until the deadline."""
        deadline = time.monotonic() + timeout_s
        self._call(None)
        for each in self.threads:
            each.thread.join(max(0.0, deadline - time.monotonic()))
            if each.thread.is_alive():
                logger.error("logger %s did not end in %.0f s; its last steps may be missing", each.name, timeout_s)


def _open(name: LoggerName, config: RunConfig, resume_step: int) -> StepLogger:
    if name == "jsonl":
        from penstock_learner.loggers.backends import JsonlLogger

        return JsonlLogger(config.folder / "metrics.jsonl", resume_step)
    if name == "tensorboard":
        from penstock_learner.loggers.backends import TensorBoardLogger

        return TensorBoardLogger(config.folder / "tensorboard", resume_step)
    if name == "wandb":
        from penstock_learner.loggers.backends import WandbLogger

        return WandbLogger(config)
    from rich.console import Console

    from penstock_learner.loggers.backends import ConsoleLogger

    return ConsoleLogger(Console())
