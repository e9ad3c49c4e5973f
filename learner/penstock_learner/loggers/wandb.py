"""Logs to a Weights & Biases run, online or offline. Needs the package `wandb`."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.config.run import RunConfig
from penstock_learner.loggers.verl_names import under_verl_names

SECTIONS = {"run", "seed", "model", "replay", "learner"}
"""Sections of the configuration that are sent to W&B. The others hold addresses and credentials."""


class WandbLogger:
    """The W&B run keeps its id through restarts. If a step is logged twice, W&B keeps the first value."""

    def __init__(self, config: RunConfig) -> None:
        import wandb

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

    def log(self, metrics: Mapping[str, float]) -> None:
        self._run.log(under_verl_names(metrics), step=int(metrics["step"]))

    def close(self) -> None:
        self._run.finish()
