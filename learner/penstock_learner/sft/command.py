"""`penstock sft`: supervised fine-tuning. It gives a run a model that already knows the format of answers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="penstock sft", description="Fine-tune a model on rows of a Parquet file.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of a run: its model and learner settings")
    parser.add_argument("--data", type=Path, required=True, help="Parquet: messages, or prompt and response, or text")
    parser.add_argument("--out", "--output", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64, help="rows per optimizer step")
    arguments, overrides = parser.parse_known_args(argv)
    from penstock.config.loading import load_config
    from penstock.logs import setup_logging

    config = load_config(arguments.config, overrides)
    setup_logging("sft", config.run)
    if arguments.out.exists():
        raise ConfigError(f"--out {arguments.out} exists already; name a new folder")
    if min(arguments.epochs, arguments.batch_size) < 1:
        raise ConfigError("--epochs and --batch-size must be at least 1")
    if config.learner.lora is not None or config.learner.sequence_parallel > 1:
        raise ConfigError("penstock sft trains whole models on whole sequences; leave lora and sequence_parallel out")
    from penstock_learner.sft.training import fine_tune

    fine_tune(config, arguments.data, arguments.out, num_epochs=arguments.epochs, batch_size=arguments.batch_size)
    print(f"wrote the model to {arguments.out}")
    return 0
