"""`penstock demo`: train a tiny model on arithmetic, end to end, on this machine, and show that it learned."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config.loading import load_config
from penstock.config.run import RunConfig
from penstock.datasets import read_prompts
from penstock.errors import ConfigError, DeadlineExceeded
from penstock.trajectory import Prompt, Sampling
from penstock_services.local.display import Progress, make_display
from penstock_services.local.local_run import LocalRun
from penstock_services.local.summary import print_summary, read_history, summarise, write_plot

POLL_S = 0.5
SUBMIT_BATCH = 256
DEFAULT_CONFIG = Path("examples/arithmetic/demo.yaml")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock demo",
        description="Train a tiny model on arithmetic on this machine, in a few minutes.",
        epilog="Any field of the config may follow as an override: --learner.lr 1e-4",
    )
    parser.add_argument("--config", type=Path, default=None, help=f"YAML file (default: {DEFAULT_CONFIG})")
    arguments, overrides = parser.parse_known_args(argv)
    config = load_config(arguments.config or _default_config(), overrides)
    if not any(word.split("=")[0] == "--run" for word in overrides):
        config = config.model_copy(update={"run": f"{config.run}-{time.strftime('%Y%m%d-%H%M%S')}"})
    asyncio.run(demo(config))
    return 0


async def demo(config: RunConfig) -> dict[str, Any]:
    """Score, train, score again; returns the summary that is also written to the run's folder."""
    started = time.monotonic()
    train, heldout = _prompts(config)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, task.cancel)
    with make_display(config) as display:
        async with LocalRun(config) as run, asyncio.timeout(config.demo.deadline_s) as deadline:
            try:
                display.say("starting vLLM and the learner")
                run.start_workers()
                score_start = await _evaluate(run, "start", heldout)
                display.say(f"held-out score before training: {score_start:.3f}")
                await _submit(run, config, train)
                await _follow(run, display)
                display.say("scoring the trained policy")
                score_end = await _evaluate(run, "end", heldout)
                final = await run.client.get_run()
            except TimeoutError as error:
                if deadline.expired():
                    raise DeadlineExceeded(
                        f"the demo was not done after {config.demo.deadline_s:.0f} s; see {run.folder / 'logs'}, "
                        "or raise demo.deadline_s"
                    ) from error
                raise
            display.say("stopping everything")
    history = read_history(config.folder)
    summary = summarise(config, history, final, score_start, score_end, time.monotonic() - started)
    (config.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_plot(config.folder / "plot.png", history, summary)
    print_summary(config, summary, history)
    return summary


def _default_config() -> Path:
    """The demo's config in this clone of the repository."""
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        if (folder / DEFAULT_CONFIG).is_file():
            return folder / DEFAULT_CONFIG
    raise ConfigError(f"{DEFAULT_CONFIG} was not found; run this in a clone of the repository, or give --config")


def _prompts(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Training prompts for the whole run, in seeded order epoch by epoch, and the held-out ones."""
    demo = config.demo
    if demo.train_file is None or demo.heldout_file is None:
        raise ConfigError("demo.train_file and demo.heldout_file must be set")
    sampling = Sampling(temperature=demo.temperature, max_tokens=demo.max_tokens)
    problems = list(read_prompts(demo.train_file, num_samples=demo.num_samples, sampling=sampling))
    heldout = list(read_prompts(demo.heldout_file, num_samples=demo.heldout_samples, sampling=sampling))
    wanted = config.replay.groups_per_step * (config.learner.num_steps + config.replay.max_staleness + 1)
    order = random.Random(config.seed)
    train: list[Prompt] = []
    while len(train) < wanted:
        train += order.sample(problems, len(problems))
    return _seeded(train[:wanted], config.seed, demo.num_samples), _seeded(heldout, config.seed, demo.heldout_samples)


def _seeded(prompts: list[Prompt], seed: int, num_samples: int) -> list[Prompt]:
    """Each sample of each prompt draws with a seed of its own."""
    base = seed * 1_000_003
    return [
        replace(prompt, sampling=replace(prompt.sampling, seed=base + index * num_samples))
        for index, prompt in enumerate(prompts)
    ]


async def _submit(run: LocalRun, config: RunConfig, prompts: list[Prompt]) -> None:
    for start in range(0, len(prompts), SUBMIT_BATCH):
        batch = prompts[start : start + SUBMIT_BATCH]
        await run.client.submit(batch, idempotency_key=f"{config.run}/{start}+{len(batch)}")


async def _evaluate(run: LocalRun, evaluation_id: str, prompts: list[Prompt]) -> float:
    """Score held-out prompts by the fleet; fails as soon as a part dies."""
    evaluation = await run.client.create_evaluation(evaluation_id, prompts)
    while evaluation.num_finished < evaluation.num_prompts:
        run.check()
        await asyncio.sleep(POLL_S)
        evaluation = await run.client.get_evaluation(evaluation_id)
    return evaluation.score


async def _follow(run: LocalRun, display: Progress) -> None:
    """Show every new step until the learner has finished."""
    while not run.learner_finished:
        run.check()
        status = await run.client.get_run()
        display.update(status, read_history(run.folder))
        await asyncio.sleep(POLL_S)
