"""Command lines on which options of the command stand beside overrides of the config."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from penstock.cli.parser import Parser, did_you_mean


def parse_with_overrides(parser: Parser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the overrides: `--section.field value` and `--section.field=value`, in any order.

    A name that is neither an option nor a field of the config is refused, with the nearest known one."""
    options: list[str] = []
    overrides: list[str] = []
    words = list(sys.argv[1:] if argv is None else argv)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or name in parser.option_names or name == "--":
            options.append(word)
            continue
        _check_name(parser, name)
        overrides.append(word)
        if not equals and words and not words[0].startswith("--"):
            overrides.append(words.pop(0))
    return parser.parse_args(options), overrides


def _check_name(parser: Parser, name: str) -> None:
    if "." in name:
        return
    from penstock.config.run import RunConfig

    if name[2:].replace("-", "_") in RunConfig.model_fields:
        return
    if hint := did_you_mean(name, parser.option_names, cutoff=0.75):
        parser.error(f"unknown option {name}; {hint}")
    from penstock.config.explanation import hint_for_key

    parser.error(f"unknown option {name}; {hint_for_key([name[2:].replace('-', '_')], RunConfig)}")
