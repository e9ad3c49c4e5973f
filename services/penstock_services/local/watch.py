"""Watching over a local run until its learner has finished."""

from __future__ import annotations

import asyncio
import itertools
import signal

from penstock.config.run import RunConfig
from penstock.errors import DeadlineExceeded, ProcessDied, Unavailable
from penstock.feed.validating import validated_steps
from penstock_services.local.display import SHOWN_METRICS, LineDisplay
from penstock_services.local.local_run import LocalRun

POLL_S = 0.5
PROGRESS_POLLS = 20
"""A look at the progress is taken every so many polls."""
PAUSED_STATES = ("PAUSED", "STOPPED")


async def watch(config: RunConfig) -> None:
    """Run until the learner has its last step, a part dies, or a signal asks to stop."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    async with LocalRun(config) as run:
        run.start_workers()
        display = LineDisplay(config)
        url = run.client.address.url
        display.say(f"run {config.run}: console and REST at {url}/, logs and checkpoints in {run.folder}")
        if (await run.client.get_run()).state in PAUSED_STATES:
            display.say(f"the run is paused; `penstock runs resume --run-dir {run.folder}` lets it go on")
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
        display.say("a part has died; stopping the others, which may take a minute")
        raise ProcessDied(f"{error}; mend it and start the run again: it goes on where it stood") from error


async def _show_progress(run: LocalRun, display: LineDisplay) -> None:
    """A gateway that does not answer is not told of here: `check` says what became of it."""
    try:
        async with asyncio.timeout(POLL_S):
            status = await run.client.get_run()
    except (TimeoutError, Unavailable):
        return
    known = {name: value for name, value in status.metrics.items() if value is not None}
    display.update(status, [known | {"step": status.step}] if known.keys() >= set(SHOWN_METRICS) else [])


async def _finish_validation(run: LocalRun, stopping: asyncio.Event) -> None:
    """The last policy is the one whose score matters most; its validation may still be under way. A run that was told
    to stop is paused: nothing is leased, and no score would come."""
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
            f"the validation of step {due} was not done after {run.config.rollout.prompt_timeout_s:.0f} s; see "
            f"{run.folder / 'logs' / 'feed.log'}, or raise rollout.prompt_timeout_s"
        ) from error
