"""`penstock sft`: supervised fine-tuning. It gives a run a model that already knows the format of answers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.parser import Parser, parse_with_overrides, whole_number
from penstock.errors import ConfigError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="penstock sft",
        description="Fine-tune a model on supervised examples. The same command continues a training that was stopped.",
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file of a run: its model, learner and sft")
    parser.add_argument("--data", nargs="+", help="files or patterns with messages, prompt and response, or text")
    parser.add_argument("--out", "--output", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--epochs", type=whole_number(1), help="passes over the data (default: sft.epochs, 1)")
    parser.add_argument("--batch-size", type=whole_number(1), help="rows of a step (default: sft.batch_size, 64)")
    arguments, overrides = parse_with_overrides(parser, argv)
    from penstock.config.loading import load_config
    from penstock.hub import with_local_files, with_local_models
    from penstock.logs import setup_logging

    given = {"file": arguments.data, "epochs": arguments.epochs, "batch_size": arguments.batch_size}
    options = [word for name, value in given.items() if value for word in (f"--sft.{name}", json.dumps(value))]
    # The number of steps follows from the file. A schedule that ends with them must not be refused before that.
    unknown_end = ["--learner.num_steps", str(10**9)]
    ranks = ["--learner.policy.num_ranks", os.environ.get("WORLD_SIZE", "1")]
    config = load_config(arguments.config, [*unknown_end, *options, *overrides, *ranks])
    setup_logging("sft", config.run)
    if arguments.out.exists():
        raise ConfigError(f"--out {arguments.out} exists already; name a new folder")
    if config.learner.router.replay:
        raise ConfigError("penstock sft has no router.replay; omit it")
    config = with_local_files(with_local_models(config), "sft")
    from penstock_tools.sft.training import fine_tune

    stopped = fine_tune(config, arguments.out)
    if stopped is not None:
        print(f"stopped after step {stopped.step}; the same command continues from {stopped.checkpoint}")
        return INTERRUPTED
    print(f"wrote the model to {arguments.out}")
    return 0
