"""Prints a table on the terminal after each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.samples.sample import Sample
from penstock_learner.loggers.verl_names import under_verl_names


class ConsoleLogger:
    """Prints a row for each group of names, for example `actor  pg_loss 0.012  entropy 0.41 …`."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def log(self, metrics: Mapping[str, float]) -> None:
        groups: dict[str, list[str]] = {}
        for name, value in sorted(under_verl_names(metrics).items()):
            group, _, rest = name.partition("/")
            groups.setdefault(group, []).append(f"{rest} {value:.4g}")
        title = f"step {metrics['step']:.0f}"
        table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
        for group, values in groups.items():
            table.add_row(Text(group, style="bold"), Text("  ".join(values)))
        self.console.print(table)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Does nothing: `penstock samples` shows them."""

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        self.console.print(Text(f"validation at step {step}: " + "  ".join(f"{n} {v:.4g}" for n, v in scores.items())))

    def close(self) -> None:
        """Does nothing: the terminal stays open."""
