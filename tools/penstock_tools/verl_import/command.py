"""`penstock import-verl`: write our configuration from a verl script, YAML file or command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.parser import Parser, whole_number

if TYPE_CHECKING:
    from penstock_tools.verl_import.imported import Imported


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)

    from penstock.errors import ConfigError
    from penstock_tools.verl_import.imported import import_words

    out: Path | None = args.out
    if out is not None and out.exists() and not args.force:
        raise ConfigError(f"{out} exists; choose another name, or overwrite it with --force")
    imported = import_words(args.words, args.max_staleness)
    source = args.words[0] if Path(args.words[0]).is_file() else "a verl command line"
    text = config_text(imported, source, str(out or "FILE"))
    report = "\n".join(report_lines(imported, shows_unneeded=not args.brief))
    if out is None:
        print(text)
        print(report, file=sys.stderr)
        return 0
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
    print(report)
    print(f"\nwrote {out}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="penstock import-verl",
        description="Write our configuration from a verl run, and list every key that changed its meaning or has no "
        "counterpart. Scripts are read, never run.",
        epilog="Examples: penstock import-verl -o run.yaml run_qwen3.sh trainer.n_gpus_per_node=4; "
        "penstock import-verl python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo …",
    )
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="YAML file to write (default: standard output)")
    parser.add_argument(
        "--max-staleness", type=whole_number(0), default=0, metavar="N",
        help="versions that a sample may lag behind; 0 trains on-policy, as verl does (default: 0)",
    )  # fmt: skip
    parser.add_argument("--brief", action="store_true", help="omit the keys that are not needed here")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="CONFIG_OR_OVERRIDES",
        help="a shell script or YAML file and more overrides, or a verl command line, or key=value words",
    )  # fmt: skip
    return parser


def report_lines(imported: Imported, *, shows_unneeded: bool = True) -> list[str]:
    """Which keys changed their meaning, which have no counterpart, and why."""
    findings = imported.findings
    lines = [
        f"{findings.num_keys} keys: {findings.num_same} mean the same, {len(findings.changed)} changed, "
        f"{len(findings.unneeded)} are not needed, {len(findings.missing)} have no counterpart"
    ]
    lines += _listed("No counterpart: decide what to do about these", findings.missing)
    lines += _listed("Changed meaning: check these", findings.changed)
    if shows_unneeded:
        lines += _listed("Not needed here", findings.unneeded)
    if findings.notes:
        lines += ["", "Notes", *(f"  {note}" for note in findings.notes)]
    return lines


def config_text(imported: Imported, source: str, file: str) -> str:
    """The YAML file: how to use it, the fields, and as comments what the import lost or changed."""
    if imported.command:
        from penstock_tools.verl_import.imported import command_line

        head = [f"# Imported from {source}. Use it with: {command_line(imported.command, file)}"]
    else:
        head = [
            f"# Imported from {source}. Check it with `penstock up {file} --check`.",
            f"# `penstock plan --config {file} --gpu NAME` says whether it fits. docs/coming-from-verl.md explains.",
        ]
    tail = [f"# {line}".rstrip() for line in report_lines(imported, shows_unneeded=False)]
    return "\n".join([*head, "", imported.yaml(), *tail, ""])


def _listed(title: str, entries: Iterable[tuple[str, Any, str]]) -> list[str]:
    lines = [f"  {name}={_short(value)}\n      {reason}" for name, value, reason in entries]
    return ["", title, *"\n".join(lines).splitlines()] if lines else []


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
