"""`penstock doctor`: check a deployment. Prints one line per check, with advice."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.connection import newest_config

if TYPE_CHECKING:
    from penstock.doctor import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock doctor",
        description="Check a deployment: Redis, clocks, ports, weights, log-probs, GPUs. Exits with 1 on a failure.",
        epilog="Any config field can be overridden: --redis.url redis://…",
    )
    parser.add_argument("--config", type=Path, help="YAML file of the run (default: that of the newest run in runs/)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args, overrides = parser.parse_known_args(argv)

    from penstock.config.loading import load_config
    from penstock.doctor import examine
    from penstock.errors import ConfigError

    path = args.config or newest_config()
    config = load_config(path, overrides)
    if not config.redis.url:
        raise ConfigError(f"{path} has no redis.url; use the config.yaml that `penstock up` writes to the run's folder")
    findings = asyncio.run(examine(config))
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    return int(any(finding.level == "fail" for finding in findings))


def _print(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(soft_wrap=True, highlight=False)
    for finding in findings:
        advice = f": {finding.advice}" if finding.advice else ""
        level = f"[{_STYLES[finding.level]}]{finding.level:<4}[/]"
        console.print(f"{level}  {finding.check:<12}  {escape(finding.text + advice)}")
