"""`penstock search-index FILE --out FOLDER` writes the index that the built-in search tool reads."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.parser import Parser
from penstock.errors import ConfigError
from penstock_rollout.agents.builtin_tools import build_index, read_passages


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="penstock search-index", description="Index a file of passages for the built-in search tool.")
    parser.add_argument("file", type=Path, help="passages: JSONL or Parquet with `contents`, or `text` and `title`")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to write the index to")
    args = parser.parse_args(argv)
    if not args.file.is_file():
        raise ConfigError(f"{args.file} does not exist; check the path")
    if args.out.exists():
        raise ConfigError(f"{args.out} exists; remove it or choose another folder")
    contents = list(read_passages(args.file))
    unfinished = args.out.with_name(f".{args.out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    build_index(contents).save(unfinished, corpus=[{"text": passage} for passage in contents], show_progress=False)
    unfinished.rename(args.out)
    print(f"{len(contents)} passages indexed in {args.out}")
    return 0
