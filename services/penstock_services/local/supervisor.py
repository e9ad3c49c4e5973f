"""`penstock up`: supervise a local run until its learner has finished."""

from __future__ import annotations

import asyncio
import itertools
import signal

from penstock.config.run import RunConfig
from penstock.errors import DeadlineExceeded, ProcessDied, Unavailable
from penstock.feed.validation import validated_steps
from penstock_services.local.display import SHOWN_METRICS, LineDisplay
from penstock_services.local.local_run import LocalRun

POLL_S = 0.5
PROGRESS_POLLS = 20
"""Progress is shown after this many polls."""
PAUSED_STATES = ("PAUSED", "STOPPED")


async def supervise(config: RunConfig) -> None:
    """Run until the learner has made its last step, a process dies, or SIGTERM or SIGINT arrives."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    async with LocalRun(config) as run:
        run.start_workers()
        display = LineDisplay(config)
        display.say(f"run {config.run}: console and REST at {run.console}, logs and checkpoints in {run.folder}")
        if (await run.client.get_run()).state in PAUSED_STATES:
            display.say(f"the run is paused; `penstock runs resume --run-dir {run.folder}` continues it")
        for poll in itertools.count(1):
            if stopping.is_set() or run.learner_finished:
                break
            _check(run, display)
            if poll % PROGRESS_POLLS == 0:
                await _show_progress(run, display)
            await asyncio.sleep(POLL_S)
        if run.learner_finished and config.dataset.validation.file is not None:
            await _finish_validation(run, stopping)
        print("the learner has finished; stopping" if run.learner_finished else "stopping")


def _check(run: LocalRun, display: LineDisplay) -> None:
    try:
        run.check()
    except ProcessDied as error:
        display.say("a process has died; stopping the others, which may take a minute")
        raise ProcessDied(
            f"{error}; fix the cause and start the run again: it continues from its last checkpoint"
        ) from error


async def _show_progress(run: LocalRun, display: LineDisplay) -> None:
    """Show the run's progress. If the gateway does not answer, show nothing: `_check` reports why."""
    try:
        async with asyncio.timeout(POLL_S):
            status = await run.client.get_run()
    except (TimeoutError, Unavailable):
        return
    known = {name: value for name, value in status.metrics.items() if value is not None}
    display.update(status, [known | {"step": status.step}] if known.keys() >= set(SHOWN_METRICS) else [])


async def _finish_validation(run: LocalRun, stopping: asyncio.Event) -> None:
    """Wait for the validation of the last policy, whose score matters most. A stopped run is paused: no prompts are
    leased, so there is nothing to wait for."""
    status = await run.client.get_run()
    every = run.config.dataset.validation.every_steps
    due = status.step // every * every
    if status.state in PAUSED_STATES:
        return
    try:
        async with asyncio.timeout(run.config.rollout.prompt_timeout_s):
            while due not in validated_steps(run.folder / "validation.jsonl") and not stopping.is_set():
                run.check()
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the validation of step {due} did not finish in {run.config.rollout.prompt_timeout_s:.0f} s; see "
            f"{run.folder / 'logs' / 'feed.log'}, or raise rollout.prompt_timeout_s"
        ) from error
