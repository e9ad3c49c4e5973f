"""Progress of a local run: a table that updates in place on a terminal, or occasional lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.api.records import Run
from penstock.config.run import RunConfig
from penstock.diagnosis.facts import progress
from penstock.diagnosis.terminal import sparkline

History = Sequence[dict[str, float]]
COLUMNS = ("step", "version", "reward", "staleness", "tokens/s", "queue")
SHOWN_METRICS = ("reward_mean", "staleness_mean", "tokens_per_second")
LINE_EVERY_STEPS = 10
LINE_EVERY_S = 30.0
"""A line is printed after this many steps, or after this time if there was at least one new step."""
WAITING_AFTER_S = 60.0
"""After this time without a new step, a line shows the state of the queue and the servers."""


class TerminalDisplay:
    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.console = Console()
        self._live = Live(Text("no step yet", style="dim"), console=self.console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def print(self, message: str) -> None:
        self.console.print(message, style="dim", highlight=False, soft_wrap=True)

    def update(self, status: Run, history: History) -> None:
        """Show the run's state from the gateway, and its history, which has one dict of metrics per step."""
        table = Table(title=f"penstock · {self.config.run}", title_style="bold", min_width=72)
        for name in COLUMNS:
            table.add_column(name, justify="right")
        table.add_row(*_cells(status, history, self.config))
        num_steps = max(self.config.learner.num_steps, 1)
        rewards = [row["reward_mean"] for row in history]
        bar = ProgressBar(
            total=num_steps, completed=min(status.step, num_steps), width=72, complete_style="green",
            finished_style="green",
        )  # fmt: skip
        self._live.update(Group(table, Text(f"reward {sparkline(rewards, 64)}", style="green"), Padding(bar)))


class LineDisplay:
    """For logs and pipes: one line every few steps, or every step if steps are slow."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._first_step = self._last_step = 0
        self._last_s = time.monotonic()

    def print(self, message: str) -> None:
        self._last_s = time.monotonic()
        print(message, flush=True)

    def update(self, status: Run, history: History) -> None:
        step = int(history[-1]["step"]) if history else 0
        num_new, quiet_s = step - self._last_step, time.monotonic() - self._last_s
        is_first = self._last_step == self._first_step
        if num_new >= LINE_EVERY_STEPS or (num_new > 0 and (is_first or quiet_s >= LINE_EVERY_S)):
            self._print_step(status, history)
        elif quiet_s >= WAITING_AFTER_S:
            self.print(_waiting(status))

    def begin_at(self, step: int) -> None:
        """Print no line for the steps up to this one, which an earlier start of the run has made."""
        self._first_step = self._last_step = step

    def update_last(self, status: Run, history: History) -> None:
        """Print the last step, unless it was printed."""
        if history and int(history[-1]["step"]) > self._last_step:
            self._print_step(status, history)

    def _print_step(self, status: Run, history: History) -> None:
        self._last_step = int(history[-1]["step"])
        cells = _cells(status, history, self.config)
        self.print("  ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, cells, strict=True)))


Display = TerminalDisplay | LineDisplay


def make_display(config: RunConfig) -> AbstractContextManager[Display]:
    return TerminalDisplay(config) if sys.stdout.isatty() else nullcontext(LineDisplay(config))


def _waiting(status: Run) -> str:
    """The state of a run that makes no steps, so that one can see what is missing."""
    if status.speed_finding is not None and status.speed_finding.code == "validation":
        return status.speed_finding.text
    states = (
        "quarantined" if server.is_quarantined else "paused by failures" if server.breaker_reason else server.state
        for server in status.servers
    )  # fmt: skip
    queue, servers = status.queue, Counter(states)
    fleet = ", ".join(f"{count} {state}" for state, count in sorted(servers.items())) or "none"
    state = "" if status.state == "RUNNING" else f" (the run is {status.state.lower()})"
    return (
        f"no new step{state}: {queue.pending_prompts} prompts pending, {queue.in_flight} in flight, "
        f"{queue.queued - queue.delivered} groups ready, {queue.dead_lettered} dead letters; servers: {fleet}"
        + (f"; {status.speed}" if status.speed and status.state == "RUNNING" else "")
    )


def _cells(status: Run, history: History, config: RunConfig) -> list[str]:
    recent = history[-10:]

    def mean(name: str) -> float:
        return sum(row[name] for row in recent) / len(recent) if recent else 0.0

    step = int(history[-1]["step"]) if history else 0
    return [
        progress(step, config.learner.num_steps),
        str(status.policy_version),
        f"{mean('reward_mean'):.3f}",
        f"{mean('staleness_mean'):.2f}",
        f"{mean('tokens_per_second'):,.0f}",
        str(status.queue.queued - status.queue.delivered),
    ]
