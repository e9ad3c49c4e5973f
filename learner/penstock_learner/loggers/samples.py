"""Writes the text of trained groups to `samples.jsonl`, of validations to `validation/samples.jsonl`, and tables to the
loggers.

    controller ─ add(step) ─► queue of MAX_WAITING steps ─► thread: decode, write, hand tables to the loggers

Training never waits for this thread. If it is too slow or the disk is full, samples are skipped and a warning says so.
Validations are recorded by the thread that calls `record`.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from penstock.codec import decode_prompt
from penstock.config.run import RunConfig
from penstock.samples import VALIDATED, Sample, SampleFile, TokenText, line_of
from penstock.trajectory import Group
from penstock_learner.loggers.step_loggers import StepLoggers

logger = logging.getLogger(__name__)
MAX_WAITING = 4
CLOSE_S = 10.0
MAX_GROUND_TRUTH = 4096
"""Longer ground truths, such as the tests of a program, are cut to this many characters of JSON."""
_OF_GROUP = ("prompt_id", "data_source", "server_id", "agent_name", "attempt", "finished_at_ms")
_OF_SAMPLE = ("min_version", "max_version", "finish_reason", "is_baseline", "reward_failed")
"""Fields of a group and of a trajectory that a sample has under the same names."""


@dataclass(frozen=True)
class TrainedStep:
    """What a step was trained on, or what a validation of it scored."""

    step: int
    policy_version: int
    """The version that the step made, or the newest one that answered the validation."""
    groups: Sequence[Group]
    prompts: Mapping[int, bytes]
    """Encoded prompts of the groups that are to be written, by id. Empty bytes if a prompt no longer exists."""
    rewards: NDArray[np.float32]
    """One for each trajectory of all groups, in order."""
    validation: str = ""
    """Name of the validation."""


class SampleLog:
    """The samples of one term, which starts from `start_step`."""

    def __init__(self, config: RunConfig, start_step: int, loggers: StepLoggers) -> None:
        self.config = config.learner.samples
        self.model_path = config.model.path
        self.start_step = start_step
        self.loggers = loggers
        self.file = SampleFile(config.folder, self.config.max_bytes)
        self.validated = SampleFile(config.folder / VALIDATED, self.config.max_bytes)
        self.waiting: queue.Queue[TrainedStep | None] = queue.Queue(MAX_WAITING)
        self.is_behind = False
        self._has_begun, self._has_failed = False, False
        self.thread = threading.Thread(target=self._run, name="samples", daemon=True)
        if self.config.share:
            self.thread.start()

    def add(self, trained: TrainedStep) -> None:
        """Queue a trained step, without waiting."""
        if not self.config.share:
            return
        try:
            self.waiting.put_nowait(trained)
            self.is_behind = False
        except queue.Full:
            if not self.is_behind:
                logger.warning(
                    "writing samples is %d steps behind, so steps from %d on are missing in samples.jsonl; lower "
                    "learner.samples.share", MAX_WAITING, trained.step,
                )  # fmt: skip
            self.is_behind = True

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until what was added is written, or until the deadline."""
        if not self.config.share:
            return
        with suppress(queue.Full):
            self.waiting.put(None, timeout=timeout_s)
            self.thread.join(timeout_s)
        if self.thread.is_alive():
            logger.error("samples were not written in %.0f s; the last steps are missing", timeout_s)

    def record(self, trained: TrainedStep) -> None:
        """Write the samples, and hand a table of them to the loggers."""
        try:
            groups = samples_of_step(trained, self.texts)
            self._write(groups, self.validated if trained.validation else self.file)
            every = self.config.table_every_steps
            if groups and every and (trained.validation or trained.step % every == 0):
                table = spread([sample for group in groups for sample in group], self.config.table_rows)
                self.loggers.log_samples(trained.step, table)
        except Exception:  # a token or a ground truth may be anything, and the next step may be fine
            logger.exception("the samples of step %d are skipped", trained.step)

    @cached_property
    def texts(self) -> TokenText:
        return TokenText.load(self.model_path)

    def _run(self) -> None:
        self.texts  # noqa: B018  (it takes a while)
        self._write([], self.file)
        while (trained := self.waiting.get()) is not None:
            self.record(trained)

    def _write(self, groups: Sequence[list[Sample]], file: SampleFile) -> None:
        """Write the groups, or skip them if the disk takes nothing. The next ones are tried again."""
        try:
            if file is self.file and not self._has_begun:
                file.begin(self.start_step)
                self._has_begun = True
            file.write(line_of(group) for group in groups)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.error("samples are not written until this is over: %s", error)
            self._has_failed = True


def samples_of_step(trained: TrainedStep, texts: TokenText) -> list[list[Sample]]:
    """The samples of every group that is to be written, one list per group."""
    groups, start = [], 0
    for group in trained.groups:
        rewards = trained.rewards[start : start + len(group.trajectories)].tolist()
        start += len(group.trajectories)
        if group.prompt_id not in trained.prompts:
            continue
        truth, owner = _truth_and_owner(trained.prompts[group.prompt_id])
        prompt = texts.text(group.prompt_token_ids.tolist(), special=True)
        common: dict[str, Any] = {name: getattr(group, name) for name in _OF_GROUP} | {
            "step": trained.step, "policy_version": trained.policy_version, "validation": trained.validation,
            "prompt": prompt, "ground_truth": truth, "owner": owner,
        }  # fmt: skip
        groups.append(
            [
                Sample(
                    **common,
                    **{name: getattr(trajectory, name) for name in _OF_SAMPLE},
                    sample=number,
                    response=texts.text(trajectory.token_ids.tolist()),
                    reward=_finite(reward),
                    reward_parts={name: _finite(value) for name, value in trajectory.reward_parts.items()},
                    num_tokens=len(trajectory.token_ids),
                )
                for number, (trajectory, reward) in enumerate(zip(group.trajectories, rewards, strict=True))
            ]
        )
    return groups


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Up to `count` samples from the worst reward to the best, evenly between them."""
    ordered = sorted(samples, key=lambda sample: -math.inf if sample.reward is None else sample.reward)
    if len(ordered) <= count:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / max(count - 1, 1))] for i in range(count)]


def _finite(value: float) -> float | None:
    """The number without the noise of float32, or None: JSON has no number for NaN and infinity."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _truth_and_owner(payload: bytes) -> tuple[object, str]:
    """The prompt's ground truth, which is cut if it is long, and its owner; `(None, "")` if the prompt is gone."""
    prompt = None
    try:
        prompt = decode_prompt(payload)
        truth: object = prompt.ground_truth
        text = truth if isinstance(truth, str) else json.dumps(truth, allow_nan=False)
    except (DecodeError, ValueError):  # it may also hold a NaN, which is not JSON
        return None, prompt.owner if prompt else ""
    return truth if len(text) <= MAX_GROUND_TRUTH else text[:MAX_GROUND_TRUTH] + " …", prompt.owner
