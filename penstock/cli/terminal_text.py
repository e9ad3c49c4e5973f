"""Text of models and users on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def shown(text: str, max_characters: int | None = None) -> str:
    """The text with visible control characters: as they are, they could move the cursor or change colours. A text
    that is longer than `max_characters` loses its middle."""
    if max_characters is not None and len(text) > max_characters:
        half = max_characters // 2
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text.strip("\n"))


def labelled(texts: Mapping[str, str], max_characters: int | None = None) -> Any:
    """A block for each text, wrapped to the terminal's width beside its label, and an empty line after all of them."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in texts.items():
        grid.add_row(f"  {label}", Text(shown(text, max_characters)))
    grid.add_row("", "")
    return grid
