"""Logs steps, samples and validations to a Weights & Biases run, online or offline. Needs the package `wandb`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.config.run import RunConfig
from penstock.samples.sample import Sample
from penstock_learner.loggers.sample_tables import COLUMNS, table_rows
from penstock_learner.loggers.verl_names import VALIDATION, under_verl_names

SECTIONS = {"run", "seed", "model", "replay", "learner"}
"""Sections of the configuration that are sent to W&B. The others hold addresses and credentials."""
VALIDATION_STEP = f"{VALIDATION}step"


class WandbLogger:
    """The W&B run keeps its id through restarts. If a step is logged twice, W&B keeps the first value."""

    def __init__(self, config: RunConfig) -> None:
        import wandb

        self._wandb = wandb
        settings = config.learner.wandb
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity or None,
            id=config.run,
            name=config.run,
            dir=str(config.folder),
            mode=settings.mode,
            resume="allow",
            config=config.model_dump(mode="json", include=SECTIONS),
        )
        self._run.define_metric(f"{VALIDATION}*", step_metric=VALIDATION_STEP)

    def log(self, metrics: Mapping[str, float]) -> None:
        self._run.log(under_verl_names(metrics), step=int(metrics["step"]))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Add a table to the newest step. W&B refuses values of earlier steps."""
        table = self._wandb.Table(columns=list(COLUMNS), data=table_rows(samples))
        self._run.log({"samples": table}, commit=False)

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Add the scores to the newest step, with the step that they belong to."""
        self._run.log({VALIDATION_STEP: step, **scores}, commit=False)

    def close(self) -> None:
        self._run.finish()
