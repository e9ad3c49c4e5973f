"""`penstock up`: supervise a local run until its learner has finished."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import time
from pathlib import Path

from penstock.api.records import Run
from penstock.config.run import RunConfig
from penstock.diagnosis.display import SHOWN_METRICS, Display, History, LineDisplay
from penstock.diagnosis.log_lines import PAUSED_STATES, Announcements, waiting_for
from penstock.errors import ConfigError, DeadlineExceeded, NotFound, ProcessDied, Unavailable
from penstock.feed.feed_process import feed_file
from penstock.feed.validation import evaluation_id, read_results, result_line, validated_steps
from penstock.step_history import VALIDATIONS
from penstock_tools.doctor.examination import newest_checkpoint
from penstock_tools.local.join import JOIN_FILE
from penstock_tools.local.local_run import LocalRun, step_of

POLL_S = 0.5
ANSWER_S = 0.5
"""How long the gateway may take to answer. `LocalRun.check` tells why it does not."""
STATUS_POLLS = 2
"""The run's status is read after this many polls, and its news are printed."""
PROGRESS_POLLS = 20


async def supervise(config: RunConfig, host: str = "") -> bool:
    """Run until the learner has made its last step, a process dies for good, or SIGTERM or SIGINT arrives. Returns
    whether Ctrl-C ended it before the last step. A second Ctrl-C before the gateway is up cancels the caller."""
    stopping, received, task = asyncio.Event(), set[signal.Signals](), asyncio.current_task()
    display, started = LineDisplay(config), time.monotonic()
    run = LocalRun(config, host=host)

    def stop(name: signal.Signals) -> None:
        if stopping.is_set() and name is signal.SIGINT:
            display.print("killing every process")
            run.processes.end_at_once()
            if not run.is_up and task is not None:
                task.cancel()
        received.add(name)
        stopping.set()

    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop, name)
    display.print(f"run {config.run}: starting Redis and the gateway; logs and checkpoints in {config.folder}")
    async with run:
        display.print(f"console and REST at {run.console}, after {time.monotonic() - started:.1f} s")
        if host:
            file = run.folder / JOIN_FILE
            display.print(f"other machines join with a copy of {file}, which holds keys: penstock join {JOIN_FILE}")
        news = await News.open(run, display)
        display.begin_at(news.status.step)
        run.start_feed()
        # A run that only validates prints what was found before too: a policy is not validated twice.
        were_printed = not config.dataset.validation.only
        validated = validated_steps(run.folder / VALIDATIONS) if were_printed else set[int]()
        has_plan = False
        for poll in itertools.count():
            if stopping.is_set() or run.learner_finished:
                break
            await check_processes(run, display)
            has_plan = has_plan or _print_plan(run, display)
            if poll % STATUS_POLLS == 0:
                await news.print_new()
                run.end_hung(news.status.servers if news.is_new else None)
                print_validations(run.folder / VALIDATIONS, display, validated)
            if poll % PROGRESS_POLLS == PROGRESS_POLLS - 1:
                display.update(*_progress(news.status))
            await asyncio.sleep(POLL_S)
        if run.learner_finished and config.dataset.validation.file is not None:
            await _finish_validation(run, stopping)
        print_validations(run.folder / VALIDATIONS, display, validated)
        has_finished = run.learner_finished
        if has_finished:
            display.update_last(*_progress(await news.print_new()))
            display.print("the learner has finished; stopping")
        else:
            run.has_trained = not waiting_for(news.status, news.before)
            news.print_stopping("; Ctrl-C again kills every process at once")
    if not has_finished:
        display.print(kept_line(config, news.status.step))
    elif (newest := newest_checkpoint(config)) is not None:
        display.print(
            f"kept: checkpoint of step {step_of(newest)}; `penstock export --config {run.config_file} --out DIR` "
            f"writes it as a model folder, and `penstock plot {config.folder}` draws the run"
        )
    return signal.SIGINT in received and not has_finished


async def view(config: RunConfig) -> None:
    """Show the console of a run that has ended until SIGTERM or SIGINT arrives."""
    stopping, display, run = asyncio.Event(), LineDisplay(config), LocalRun(config, is_view=True)
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopping.set)
    run.processes.on_wait = run.on_restart = display.print
    async with run:
        display.print(f"console and REST at {run.console}; nothing trains; Ctrl-C ends it")
        while not stopping.is_set():
            await check_processes(run, display)
            await asyncio.sleep(POLL_S)


def kept_line(config: RunConfig, step: int) -> str:
    """What a run that was stopped after `step` keeps and loses, and how to continue it."""
    newest = newest_checkpoint(config)
    kept = 0 if newest is None else step_of(newest)
    num_lost = step - kept
    lost = f"; lost: {num_lost} step{'s' * (num_lost > 1)} since then, to be made again" if num_lost > 0 else ""
    checkpoint = "the model folder (there is no checkpoint yet)" if newest is None else f"checkpoint of step {kept}"
    return f"kept: {checkpoint}{lost}; continue with the same command"


async def check_processes(run: LocalRun, display: LineDisplay) -> None:
    """Raise `Child.error` of a process whose death ends the run. Its name is printed before the others stop."""
    try:
        await run.check()
    except (ConfigError, ProcessDied) as error:
        name = str(error).partition(" ")[0]
        display.print(f"{name} has died; stopping the others, which may take a minute")
        again = "fix the cause and start the run again: it continues from its last checkpoint"
        raise type(error)(f"{error}; {again}") from error


def _progress(status: Run) -> tuple[Run, History]:
    known = {name: value for name, value in status.metrics.items() if value is not None}
    return status, [known | {"step": status.step}] if known.keys() >= set(SHOWN_METRICS) else []


def _print_plan(run: LocalRun, display: LineDisplay) -> bool:
    """Print the plan that the feed has made. Returns whether there is one yet."""
    file = run.folder / f"{feed_file(run.config)}.json"
    if not file.exists():
        return False
    display.print(json.loads(file.read_text())["plan"])
    return True


def print_validations(results: Path, display: LineDisplay, printed: set[int]) -> None:
    """Print the validations whose step is not in `printed`, and add it."""
    for result in read_results(results):
        if result["step"] not in printed:
            printed.add(result["step"])
            display.print(result_line(result))


async def _finish_validation(run: LocalRun, stopping: asyncio.Event) -> None:
    """Wait for the validation of the last policy. A stopped run is paused, so there is nothing to wait for."""
    status, timeout_s = await run.client.get_run(), run.config.rollout.prompt_timeout_s
    if status.state in PAUSED_STATES:
        return
    due, num_finished, deadline = status.step, -1, 0.0
    while due not in validated_steps(run.folder / VALIDATIONS) and not stopping.is_set():
        await run.check()
        before, num_finished = num_finished, await _num_validated(run, due)
        if num_finished > before:
            deadline = time.monotonic() + timeout_s
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"no prompt of the validation of step {due} finished for {timeout_s:.0f} s; see "
                f"{run.folder / 'logs' / 'feed.log'}, or raise rollout.prompt_timeout_s"
            )
        await asyncio.sleep(POLL_S)


async def _num_validated(run: LocalRun, step: int) -> int:
    """How many prompts the validation of a step has finished. 0 before it began."""
    try:
        evaluation = await run.client.get_evaluation(evaluation_id(run.config.dataset.name, step))
    except NotFound:
        return 0
    return evaluation.num_finished


class News:
    """Reads the run's status and prints what is new in it. Open it before the feed is started."""

    def __init__(self, run: LocalRun, display: Display, status: Run) -> None:
        self.run = run
        self.display = display
        self.before = self.status = status
        """The newest status that the gateway has answered with."""
        self.is_new = True
        """Whether the newest question was answered."""
        self._announcements = Announcements(status, f"penstock runs resume --run-dir {run.folder}")

    @classmethod
    async def open(cls, run: LocalRun, display: Display) -> News:
        run.processes.on_wait = run.on_restart = display.print
        return cls(run, display, await run.client.get_run())

    async def print_new(self) -> Run:
        self.is_new = False
        try:
            async with asyncio.timeout(ANSWER_S):
                self.status = await self.run.client.get_run()
        except (TimeoutError, Unavailable):
            return self.status
        self.is_new = True
        for line in self._announcements.new_lines(self.status):
            self.display.print(line)
        return self.status

    def print_stopping(self, after: str = "") -> None:
        """Print that the run is stopped, and its step, or what it was waiting for if it was still starting."""
        waited = waiting_for(self.status, self.before)
        at = f"it was still starting ({waited})" if waited else f"it was at step {self.status.step}"
        if self.status.state == "PAUSED":
            at = f"it was paused at step {self.status.step}"
        self.display.print(f"stopping the run; {at}{after}")
