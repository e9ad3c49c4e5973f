"""The demo itself: score the held-out prompts, train, score them again, and write a summary."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from penstock.api.records import Run
from penstock.config.run import RunConfig
from penstock.diagnosis.display import Progress, make_display
from penstock.diagnosis.facts import NO_LEARNER
from penstock.diagnosis.log_lines import PAUSED_STATES
from penstock.errors import ConfigError, Conflict, DeadlineExceeded
from penstock.feed.datasets import read_prompts
from penstock.trajectory import Prompt, Sampling
from penstock_services.local.local_run import LocalRun
from penstock_services.local.news import News
from penstock_services.local.summary import print_summary, read_history, summarise, write_plot

POLL_S = 0.5
SUBMIT_BATCH = 512
"""Number of prompts that are submitted at once, whenever fewer than this wait in the queue."""


async def demo(config: RunConfig) -> dict[str, Any]:
    """Score, train and score again. Returns the summary, which is also written to the run's folder."""
    started = time.monotonic()
    train, heldout = _prompts(config)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, task.cancel)
    with make_display(config) as display:
        display.say("starting Redis and the gateway")
        async with LocalRun(config) as run:
            display.say(f"starting the rollout server and the learner; console: {run.console}")
            news = await News.open(run, display)
            run.start_workers()
            try:
                async with asyncio.timeout(config.demo.deadline_s) as deadline:
                    score_start = await _evaluate(run, "start", heldout, news)
                    await _show_fallback(run, display)
                    display.say(f"held-out score before training: {score_start:.3f}")
                    await _train(run, train, display, news)
                    display.say("scoring the trained policy")
                    score_end = await _evaluate(run, "end", heldout, news)
                    final = await run.client.get_run()
            except asyncio.CancelledError:
                news.say_stopping()
                raise
            except TimeoutError as error:
                if deadline.expired():
                    paused = ", and its run is paused" if news.status.state in PAUSED_STATES else ""
                    raise DeadlineExceeded(
                        f"the demo did not finish in {config.demo.deadline_s:.0f} s{paused}; see "
                        f"{run.folder / 'logs'}, or raise demo.deadline_s"
                    ) from error
                raise
            display.say("stopping everything")
    history = read_history(config.folder)
    summary = summarise(config, history, final, score_start, score_end, time.monotonic() - started)
    (config.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_plot(config.folder / "plot.png", history, summary)
    print_summary(config, summary, history)
    return summary


def _prompts(config: RunConfig) -> tuple[Iterator[Prompt], list[Prompt]]:
    """Return an endless iterator of training prompts, shuffled for each epoch by the seed, and the held-out prompts."""
    demo = config.demo
    if demo.train_file is None or demo.heldout_file is None:
        raise ConfigError("demo.train_file and demo.heldout_file must be set")
    sampling = Sampling(temperature=demo.temperature, max_tokens=demo.max_tokens)
    problems = list(read_prompts(demo.train_file, num_samples=demo.num_samples, sampling=sampling))
    heldout = list(read_prompts(demo.heldout_file, num_samples=demo.heldout_samples, sampling=sampling))
    order = random.Random(config.seed)
    epochs = (order.sample(problems, len(problems)) for _ in itertools.count())
    train = itertools.chain.from_iterable(epochs)
    return _seeded(train, config.seed, demo.num_samples), list(_seeded(heldout, config.seed, demo.heldout_samples))


def _seeded(prompts: Iterable[Prompt], seed: int, num_samples: int) -> Iterator[Prompt]:
    """Give every sample of every prompt its own seed."""
    base = seed * 1_000_003
    for index, prompt in enumerate(prompts):
        yield replace(prompt, sampling=replace(prompt.sampling, seed=base + index * num_samples))


async def _evaluate(run: LocalRun, evaluation_id: str, prompts: list[Prompt], news: News) -> float:
    """Score held-out prompts. Raises ProcessDied as soon as a process dies for good."""
    evaluation = await run.client.create_evaluation(evaluation_id, prompts)
    while evaluation.num_finished < evaluation.num_prompts:
        await run.check()
        check_not_paused(await news.say())
        await asyncio.sleep(POLL_S)
        evaluation = await run.client.get_evaluation(evaluation_id)
    return evaluation.score


def check_not_paused(status: Run) -> None:
    """Raise Conflict if the run has paused itself, or was stopped: the demo would only reach its deadline. An operator
    who has paused it may resume it."""
    if status.state in PAUSED_STATES and status.detail != NO_LEARNER and (status.detail or status.state == "STOPPED"):
        why = f"has paused itself: {status.detail}" if status.detail else "was stopped by an operator"
        raise Conflict(f"the demo ends, because its run {why}")


async def _show_fallback(run: LocalRun, display: Progress) -> None:
    """Tell the user if `auto` did not find vLLM."""
    engines = {server.engine for server in await run.client.servers()}
    if run.config.rollout.engine.name == "auto" and engines == {"torch"}:
        display.say("vLLM is not installed here: the torch engine generates instead")


async def _train(run: LocalRun, prompts: Iterator[Prompt], display: Progress, news: News) -> None:
    """Submit prompts and show progress until the learner has finished."""
    num_submitted = 0
    while not run.learner_finished:
        await run.check()
        status = await news.say()
        check_not_paused(status)
        if status.queue.pending_prompts < SUBMIT_BATCH:
            batch = list(itertools.islice(prompts, SUBMIT_BATCH))
            await run.client.submit(batch, idempotency_key=f"{run.config.run}/{num_submitted}")
            num_submitted += len(batch)
        display.update(status, read_history(run.folder))
        await asyncio.sleep(POLL_S)
