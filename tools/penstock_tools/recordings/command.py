"""`penstock queue export` and `penstock queue import`: the groups of a queue to a Parquet file, and back."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.parser import Parser
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.replay.inspection import QueueInspector

WAIT_S = 600.0


def add_commands(add: Callable[..., Parser]) -> None:
    """Add both to `penstock queue`. `add` takes a command's name, function and help, and returns its parser."""
    export = add("export", _export, "write the ready groups to a Parquet file; changes nothing")
    export.add_argument("file", type=Path)
    export.add_argument("--all", action="store_true", help="also groups that the learner has taken and not committed")
    export.add_argument("--force", action="store_true", help="replace the file if it exists")

    imports = add("import", _import, "import the groups of a Parquet file into a queue")
    imports.set_defaults(may_start_queue=True)
    imports.add_argument("file", type=Path)
    imports.add_argument(
        "--epoch", type=int, default=0, help="use another number to import the same file again (default: %(default)s)"
    )
    imports.add_argument(
        "--wait-s", type=float, default=WAIT_S, metavar="S",
        help="how long to wait for room in a full queue (default: %(default).0f)",
    )  # fmt: skip


async def _export(args: argparse.Namespace, inspector: QueueInspector) -> int:
    from penstock_tools.recordings.transfer import export_groups

    if args.file.exists() and not args.force:
        raise InvalidInput(str(args.file), "exists; choose another name or add --force")
    with _progress("exporting") as advance:
        exported = await export_groups(inspector, args.file, include_delivered=args.all, advance=advance)
    missed = f"; {exported.num_committed} were committed meanwhile" if exported.num_committed else ""
    print(f"exported {exported.num_groups} groups of run {inspector.run} to {args.file}{missed}")
    for line in exported.unreadable:
        print(f"skipped {line}")
    return 0


async def _import(args: argparse.Namespace, inspector: QueueInspector) -> int:
    from penstock_tools.recordings.transfer import import_groups

    with _progress("importing") as advance:
        imported = await import_groups(inspector, args.file, epoch=args.epoch, wait_s=args.wait_s, advance=advance)
    print(
        f"imported {imported.num_groups} groups into run {inspector.run}; "
        f"{imported.num_present} groups of the file were imported before"
    )
    return 0


@contextmanager
def _progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """Yields `advance(done, total)`, which draws a progress bar on a terminal."""
    from penstock.cli.output import progress_bar

    with progress_bar(text) as progress:
        task = progress.add_task("")
        yield lambda done, total: progress.update(task, completed=done, total=total)
