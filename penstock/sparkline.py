"""A small bar chart in one line of text."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values from 0 to 1 as bars, the newest on the right. More values than `width` are averaged."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    return "".join(_BARS[min(int(max(value, 0.0) * len(_BARS)), len(_BARS) - 1)] for value in values)
