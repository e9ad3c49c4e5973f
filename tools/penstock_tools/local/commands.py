"""`penstock up` and `penstock demo`: the command lines. What they need is imported once they are parsed."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from penstock.cli.parser import Parser, interruptible, parse_with_overrides, whole_number

DEMO_CONFIG = Path("examples/arithmetic/demo.yaml")
DEMO_PATHS = ("model.path", "rollout.reward.function_file", "demo.train_file", "demo.heldout_file")
"""Fields of the demo's config that name files of the repository."""
ALL_STOPPED = "every process of it was stopped"
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C. It is not 0, because the run has not finished."""


def up(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="penstock up",
        description="Start Redis, the gateway, rollout servers and the learner of a config file on this machine. "
        "Ctrl-C stops them; the same command continues the run.",
        epilog="Any config field can be overridden: --learner.num_steps 200. docs/config.md lists all fields.",
    )
    parser.add_argument("config", type=Path, help="YAML file of the run")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    parser.add_argument("--host", default="", help="address of this machine at which others reach it and join the run")
    parser.add_argument("--view", action="store_true", help="show the console of a run that has ended; nothing trains")
    arguments, overrides = parse_with_overrides(parser, argv)
    if arguments.view and (arguments.check or arguments.host):
        parser.error("--view starts nothing that could be checked or joined; omit --check and --host")

    import asyncio

    from penstock.config.loading import load_config
    from penstock.hub import is_hub_id, with_local_datasets, with_local_models
    from penstock.machine import keep_files_private
    from penstock.start_checks import doubts_about
    from penstock_tools.local.private_redis import without_private_redis

    config = without_private_redis(load_config(arguments.config, overrides))
    if arguments.view:
        from penstock_tools.local.supervisor import view

        keep_files_private()
        resolved = config.folder / "config.yaml"
        if is_hub_id(config.model.path) and resolved.is_file():  # it names the folder that was downloaded
            config = config.changed({"model.path": load_config(resolved).model.path})
        asyncio.run(view(config))
        return 0
    config = with_local_datasets(with_local_models(config))
    for doubt in doubts_about(config):
        print(f"warning: {doubt}", flush=True)
    if arguments.check:
        print("checking the config, its files and ports", flush=True)
        from penstock_tools.local.start_check import check_before_start, check_processes

        check_before_start(config)
        checked, doubts = asyncio.run(check_processes(config, arguments.host))
        for doubt in doubts:
            print(f"warning: {doubt}", flush=True)
        print(f"{arguments.config}: ok; checked: {'; '.join(['config, files and ports', *checked])}")
        return 0
    from penstock_tools.local.supervisor import supervise

    keep_files_private()
    with interruptible(f"before the run was up; {ALL_STOPPED}"):
        return INTERRUPTED if asyncio.run(supervise(config, arguments.host)) else 0


def join(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="penstock join",
        description="Make this machine part of a run that `penstock up --host` has started on another one, until "
        "Ctrl-C: start rollout servers, or a Ray node for the learner's ranks.",
        epilog="Any config field can be overridden for this machine: --model.path /data/model",
    )
    parser.add_argument("file", type=Path, help="copy of join.yaml from the run's folder, with the mode 0600")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--servers", type=whole_number(1), metavar="N",
        help="number of rollout servers (default: as many as fit on the GPUs)",
    )  # fmt: skip
    what.add_argument("--ray-node", action="store_true", help="offer CPUs and GPUs to the learner instead")
    arguments, overrides = parse_with_overrides(parser, argv)

    from penstock.machine import keep_files_private
    from penstock_tools.local.join import Joined

    keep_files_private()
    Joined(arguments.file, overrides, arguments.servers, is_ray_node=arguments.ray_node).run()
    return 0


def demo(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="penstock demo",
        description="Train a tiny model on arithmetic on this machine. Takes a few minutes; needs no GPU.",
        epilog="Any config field can be overridden: --learner.lr 1e-4",
    )
    parser.add_argument("--config", type=Path, default=None, help=f"YAML file (default: {DEMO_CONFIG})")
    arguments, overrides = parse_with_overrides(parser, argv)

    import asyncio
    import time

    from penstock.config.loading import load_config
    from penstock.machine import keep_files_private
    from penstock_tools.local.demo import run_demo

    given = {word.split("=")[0].removeprefix("--") for word in overrides}
    config = load_config(arguments.config or _clone() / DEMO_CONFIG, overrides)
    if arguments.config is None:  # its paths are relative to the clone, and not to the folder where one starts it
        found = {name: attrgetter(name)(config) for name in DEMO_PATHS if name not in given}
        config = config.changed({name: _clone() / path for name, path in found.items()})
    if "run" not in given:
        config = config.changed({"run": f"{config.run}-{time.strftime('%Y%m%d-%H%M%S')}"})
    keep_files_private()
    with interruptible(f"before the demo was done; {ALL_STOPPED}"):
        asyncio.run(run_demo(config))
    return 0


def _clone() -> Path:
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        if (folder / DEMO_CONFIG).is_file():
            return folder
    from penstock.errors import ConfigError

    raise ConfigError(f"{DEMO_CONFIG} was not found; run this in a clone of the repository, or give --config")
