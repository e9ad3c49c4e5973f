"""`penstock doctor`: the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.connection import load_started_config, newest_config
from penstock.cli.output import to_json
from penstock.cli.parser import Parser, parse_with_overrides, run_interruptible
from penstock.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock doctor",
        description="Check a deployment: Redis, clocks, ports, weights, log-probs, GPUs. Exits with 1 on a failure.",
        epilog="Any config field can be overridden: --redis.url redis://…",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--config",
        type=Path,
        help="YAML file of the run (default: that of the run that is up in runs/, else the newest)",
    )
    which.add_argument("--run-dir", type=Path, metavar="DIR", help="folder of a run on this machine")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args, overrides = parse_with_overrides(parser, argv)

    from penstock.diagnosis.terminal import print_findings
    from penstock_tools.doctor.examination import examine

    written = None if args.run_dir is None else args.run_dir / "config.yaml"
    if written is not None and not written.is_file():
        raise ConfigError(f"{args.run_dir} has no config.yaml; give the folder of a run that was started")
    file = args.config or written
    if file is None:
        file = newest_config()
        print(f"penstock doctor: {file.parent}, since neither --config nor --run-dir names a run", file=sys.stderr)
    config = load_started_config(file, overrides)
    if args.run_dir is not None and args.run_dir.resolve().name == config.run:
        # The written path may be relative to the folder in which the run was started.
        config = config.changed({"run_dir": args.run_dir.resolve().parent})
    findings = run_interruptible(examine(config), "while it examined the run")
    if args.json:
        print(to_json([finding.model_dump() | {"level": finding.level.lower()} for finding in findings]))
    else:
        print_findings(findings)
    return int(any(finding.level == "FAIL" for finding in findings))
