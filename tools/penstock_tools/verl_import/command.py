"""`penstock import-verl`: write our configuration from a verl script, YAML file or command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.parser import Parser


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)

    from penstock.errors import ConfigError
    from penstock_tools.verl_import.imported import import_words
    from penstock_tools.verl_import.report import config_text, report_lines

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
        "--max-staleness", type=_count, default=0, metavar="N",
        help="versions that a sample may lag behind; 0 trains on-policy, as verl does (default: 0)",
    )  # fmt: skip
    parser.add_argument("--brief", action="store_true", help="leave out the keys that are not needed here")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="CONFIG_OR_OVERRIDES",
        help="a shell script or YAML file and more overrides, or a verl command line, or key=value words",
    )  # fmt: skip
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of versions")
    return int(text)
