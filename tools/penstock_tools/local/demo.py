"""The demo itself: score the held-out prompts, train, score them again, and write a summary."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.api.records import Run
from penstock.config.dataset import DatasetConfig
from penstock.config.run import RunConfig
from penstock.diagnosis.display import Display, History, make_display
from penstock.diagnosis.facts import NO_LEARNER
from penstock.diagnosis.log_lines import PAUSED_STATES
from penstock.diagnosis.terminal import sparkline
from penstock.errors import ConfigError, Conflict, DeadlineExceeded
from penstock.feed.dataset_feed import PromptStream, seeded
from penstock.feed.datasets import read_prompts
from penstock.step_history import read_steps
from penstock.trajectory import Prompt, Sampling
from penstock_tools.local.local_run import LocalRun
from penstock_tools.local.supervisor import News
from penstock_tools.plot import Panel, RunHistory, draw

PLOTTED = ("reward_mean", "staleness_mean", "tokens_per_second")
POLL_S = 0.5
SUBMIT_BATCH = 512
"""Number of prompts that are submitted at once, whenever fewer than this wait in the queue."""


async def run_demo(config: RunConfig) -> dict[str, Any]:
    """Score, train and score again. Returns the summary, which is also written to the run's folder."""
    started = time.monotonic()
    train, heldout = _prompts(config)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, task.cancel)
    with make_display(config) as display:
        display.print("starting Redis and the gateway")
        async with LocalRun(config) as run:
            display.print(f"starting the rollout server and the learner; console: {run.console}")
            news = await News.open(run, display)
            run.start_feed()
            try:
                async with asyncio.timeout(config.demo.deadline_s) as deadline:
                    score_start = await _evaluate(run, "start", heldout, news)
                    engines = {server.engine for server in await run.client.servers()}
                    if config.rollout.engine.name == "auto" and engines == {"torch"}:
                        display.print("vLLM is not installed here: the torch engine generates instead")
                    display.print(f"held-out score before training: {score_start:.3f}")
                    await _train(run, train, display, news)
                    display.print("scoring the trained policy")
                    score_end = await _evaluate(run, "end", heldout, news)
                    final = await run.client.get_run()
            except asyncio.CancelledError:
                news.print_stopping()
                raise
            except TimeoutError as error:
                if deadline.expired():
                    paused = ", and its run is paused" if news.status.state in PAUSED_STATES else ""
                    raise DeadlineExceeded(
                        f"the demo did not finish in {config.demo.deadline_s:.0f} s{paused}; see "
                        f"{run.folder / 'logs'}, or raise demo.deadline_s"
                    ) from error
                raise
            display.print("stopping everything")
    history = read_steps(config.folder)
    summary = summarise(config, history, final, score_start, score_end, time.monotonic() - started)
    (config.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    title = f"{config.run}: held-out {score_start:.2f} → {score_end:.2f} in {summary['steps']} steps"
    scores = {0: score_start, summary["steps"]: score_end}
    runs, panels = [RunHistory(config.run, history, scores)], [Panel(name) for name in PLOTTED]
    draw(config.folder / "plot.png", runs, panels, title=title, num_columns=1)
    print_summary(config, summary, history)
    return summary


def _prompts(config: RunConfig) -> tuple[PromptStream, list[Prompt]]:
    """The training prompts without end, shuffled for each epoch by the seed, and the held-out prompts."""
    demo = config.demo
    if demo.train_file is None or demo.heldout_file is None:
        raise ConfigError("demo.train_file and demo.heldout_file must be set")
    sampling = Sampling(temperature=demo.temperature, max_tokens=demo.max_tokens)
    problems = list(read_prompts(demo.train_file, num_samples=demo.num_samples, sampling=sampling))
    heldout = list(read_prompts(demo.heldout_file, num_samples=demo.heldout_samples, sampling=sampling))
    train = PromptStream(problems, DatasetConfig(epochs=0), config.seed)
    return train, [seeded(prompt, config.seed, number) for number, prompt in enumerate(heldout)]


async def _evaluate(run: LocalRun, evaluation_id: str, prompts: list[Prompt], news: News) -> float:
    """Score held-out prompts. Raises ProcessDied as soon as a process dies for good."""
    evaluation = await run.client.create_evaluation(evaluation_id, prompts)
    while evaluation.num_finished < evaluation.num_prompts:
        await run.check()
        check_not_paused(await news.print_new())
        await asyncio.sleep(POLL_S)
        evaluation = await run.client.get_evaluation(evaluation_id)
    return evaluation.score


def check_not_paused(status: Run) -> None:
    """Raise Conflict if the run paused itself or was stopped. An operator who has paused it may resume it."""
    if status.state in PAUSED_STATES and status.detail != NO_LEARNER and (status.detail or status.state == "STOPPED"):
        why = f"has paused itself: {status.detail}" if status.detail else "was stopped by an operator"
        raise Conflict(f"the demo ends, because its run {why}")


async def _train(run: LocalRun, prompts: PromptStream, display: Display, news: News) -> None:
    num_submitted = 0
    while not run.learner_finished:
        await run.check()
        status = await news.print_new()
        check_not_paused(status)
        if status.queue.pending_prompts < SUBMIT_BATCH:
            batch = prompts.chunk(num_submitted, SUBMIT_BATCH)
            await run.client.submit(batch, idempotency_key=f"{run.config.run}/{num_submitted}")
            num_submitted += len(batch)
        display.update(status, read_steps(run.folder))
        await asyncio.sleep(POLL_S)


# ── the report ──


def summarise(
    config: RunConfig, history: History, final: Run, score_start: float, score_end: float, seconds: float
) -> dict[str, Any]:
    """Summarise the whole run. Throughput is trained response tokens divided by the time spent in steps."""
    num_tokens = sum(row["response_tokens"] for row in history)
    training_s = sum(row["step_s"] for row in history)
    staleness = sum(row["staleness_mean"] * row["response_tokens"] for row in history)
    queue = final.queue
    return {
        "run": config.run,
        "score_start": round(score_start, 4),
        "score_end": round(score_end, 4),
        "seconds": round(seconds, 1),
        "steps": int(history[-1]["step"]) if history else 0,
        "policy_version": final.policy_version,
        "staleness_mean": round(staleness / max(num_tokens, 1), 3),
        "staleness_max": int(max((row["staleness_max"] for row in history), default=0)),
        "groups_trained": queue.trained,
        "tokens_per_second": round(num_tokens / max(training_s, 1e-9), 1),
        "in_flight_updates": int(max((row["in_flight_updates"] for row in history), default=0)),
        "mixed_version_trajectories": round(sum(row["mixed_version_ratio"] * row["num_sequences"] for row in history)),
        "conservation_error": queue.conservation_error,
        "training_seconds": round(training_s, 1),
        "engine": ", ".join(sorted({server.engine for server in final.servers})),
        "placement": config.learner.placement,
        "seed": config.seed,
    }


def print_summary(config: RunConfig, summary: dict[str, Any], history: History) -> None:
    console = Console()
    table = Table(title="summary", show_header=False, min_width=60)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("held-out score", f"{summary['score_start']:.3f} → {summary['score_end']:.3f}", style="bold green")
    for label, key in (
        ("seconds", "seconds"), ("steps", "steps"), ("policy version", "policy_version"),
        ("groups trained", "groups_trained"), ("staleness, mean", "staleness_mean"),
        ("staleness, max", "staleness_max"),
        ("trained tokens/s", "tokens_per_second"), ("updates in flight", "in_flight_updates"),
        ("trajectories with several versions", "mixed_version_trajectories"),
        ("conservation error", "conservation_error"), ("engine", "engine"),
    ):  # fmt: skip
        table.add_row(label, str(summary[key]))
    console.print(table)
    console.print(f"reward {sparkline([row['reward_mean'] for row in history], 60)}", style="green")
    for name in ("plot.png", "summary.json"):
        console.print(str(config.folder / name), soft_wrap=True, highlight=False)
    wrote = f"`penstock samples --run-dir {config.folder}` shows what the model wrote"
    console.print(f"{wrote}; docs/tutorial.md trains on your own data", soft_wrap=True, highlight=False)
