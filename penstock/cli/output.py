"""The output of commands: JSON, tables, texts of models and users, and progress bars. Imports rich only to draw."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress


LINE_EVERY_S = 15.0


def to_json(value: Any, indent: int | None = 2) -> str:
    return json.dumps(value, indent=indent, default=lambda record: record.model_dump(mode="json"))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, whole: Sequence[str] = (), empty: str = ""
) -> None:
    """Print a table, as `plain_table` makes it, or the line `empty` if it has no rows and there is such a line."""
    from rich.console import Console

    from penstock.diagnosis.terminal import plain_table

    rows = list(rows)
    Console().print(plain_table(columns, rows, whole=whole) if rows or not empty else empty)


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


def as_text(value: Any) -> str:
    """A ground truth as it is shown."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def versions_text(low: int, high: int) -> str:
    return f"version {low}" if low == high else f"versions {low}-{high}"


def progress_bar(text: str, file: TextIO | None = None) -> Progress:
    """A progress bar on a terminal, or else a line every LINE_EVERY_S. It goes to stderr, or to `file`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    class Lines(Progress):
        printed_s = time.monotonic()

        def advance(self, task_id: TaskID, advance: float = 1) -> None:
            super().advance(task_id, advance)
            if self.disable and time.monotonic() - self.printed_s >= LINE_EVERY_S:
                self.printed_s, task = time.monotonic(), self.tasks[task_id]
                self.console.print(f"{text}: {task.completed:,.0f} of {task.total:,.0f}", highlight=False)

    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True, file=file)
    return Lines(*columns, console=console, transient=True, disable=not console.is_terminal)
