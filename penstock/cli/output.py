"""The output of commands: JSON, texts of models and users, and progress bars. Imports rich only to draw."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

    from penstock.api.records import Record


def to_json(record: Record | Sequence[Record], indent: int | None = 2) -> str:
    """The output of `--json`."""
    from penstock.api.records import Record

    if isinstance(record, Record):
        return json.dumps(record.model_dump(mode="json"), indent=indent)
    return json.dumps([each.model_dump(mode="json") for each in record], indent=indent)


def shown(text: str, max_characters: int | None = None) -> str:
    """The text with visible control characters: as they are, they could move the cursor or change colours. A text
    that is longer than `max_characters` loses its middle."""
    if max_characters is not None and len(text) > max_characters:
        half = max_characters // 2
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text.strip("\n"))


def labelled(texts: Mapping[str, str], max_characters: int | None = None) -> Any:
    """A block for each text, wrapped to the terminal's width next to its label, and an empty line after all of them."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in texts.items():
        grid.add_row(f"  {label}", Text(shown(text, max_characters)))
    grid.add_row("", "")
    return grid


def progress_bar(text: str) -> Progress:
    """A progress bar on stderr, shown only if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
