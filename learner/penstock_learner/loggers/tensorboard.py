"""Writes scalars, and samples as text, to TensorBoard's event files. Needs the package `tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.samples.sample import Sample
from penstock_learner.loggers.sample_tables import markdown
from penstock_learner.loggers.verl_names import under_verl_names

FLUSH_S = 10


class TensorBoardLogger:
    """Writes event files to a folder. When a run resumes, steps after `resume_step` replace those written before."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1, flush_secs=FLUSH_S)

    def log(self, metrics: Mapping[str, float]) -> None:
        for name, value in under_verl_names(metrics).items():
            self._writer.add_scalar(name, value, int(metrics["step"]), walltime=metrics["time"])

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._writer.add_text("samples", markdown(samples), step)

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        for name, value in scores.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
