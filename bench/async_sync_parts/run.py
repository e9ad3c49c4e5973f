"""One run of the demo's task, with the engine on one core and the learner on another.

    python bench/async_sync_parts/run.py SETTINGS.json

Redis, the gateway and this process are on any core. The clock starts with the first prompt, when server and learner are
ready, so neither their start nor groups from before count.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from penstock.client import PenstockClient
from penstock.config.loading import load_config
from penstock.config.run import RunConfig
from penstock.feed.datasets import read_prompts
from penstock.step_history import read_steps
from penstock.trajectory import Prompt, Sampling
from penstock_tools.local.local_run import LocalRun
from penstock_tools.local.processes import Child

ARITHMETIC = Path(__file__).parents[2] / "examples" / "arithmetic"
NUM_SAMPLES = 4
MAX_TOKENS = 8


def score_snapshots(folder: Path) -> list[tuple[int, float]]:
    """(version, score) of every snapshot, in the order of versions. A version is the number of its step."""
    return [(int(path.name.removeprefix("version-")), score(path)) for path in sorted(folder.glob("version-*"))]


def score(model_folder: Path) -> float:
    """The mean reward of samples at temperature 1. Every call draws with the same seed, so that scores differ by the
    policy."""
    import pyarrow.parquet as parquet
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    compute_score = runpy.run_path(str(ARITHMETIC / "reward.py"))["compute_score"]
    rows = parquet.read_table(ARITHMETIC / "heldout.parquet").to_pylist()
    tokenizer: Any = AutoTokenizer.from_pretrained(ARITHMETIC / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False) for row in rows for _ in range(NUM_SAMPLES)]
    given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(0)
    with torch.inference_mode():
        answered = model.generate(
            **given, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=MAX_TOKENS,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    answers = tokenizer.batch_decode(answered[:, given["input_ids"].shape[1] :])
    truths = [row["reward_model"]["ground_truth"] for row in rows for _ in range(NUM_SAMPLES)]
    rewards: list[float] = [compute_score("", answer, truth) for answer, truth in zip(answers, truths, strict=True)]
    return sum(rewards) / len(rewards)


ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "arithmetic" / "demo.yaml"
START_S, TRAIN_S = 550.0, 300.0
POLL_S = 0.2
SUBMIT_EVERY_S = 1.0
"""Rarely: asking how many prompts are left takes time of a core that the run needs."""
SUBMIT_BATCH = 256
GROUPS_PER_UPDATE = 32
"""The demo's `groups_per_step`, whose step is one update."""


@dataclass(frozen=True)
class Variant:
    """How a run differs from the others."""

    max_staleness: int
    is_corrected: bool
    seed: int
    num_steps: int
    engine: str
    lr: float
    snapshot_every: int
    updates_per_step: int = 1
    """A step takes GROUPS_PER_UPDATE groups for each of its updates."""

    @property
    def name(self) -> str:
        if self.max_staleness == 0:
            return "synchronous"
        return f"staleness {self.max_staleness}, {'corrected' if self.is_corrected else 'not corrected'}"


@dataclass(frozen=True)
class Serving:
    """How a rollout server scores samples."""

    reward_file: Path = ROOT / "examples" / "arithmetic" / "reward.py"
    scores_by_prompt: bool = False
    """The file has a `compute_score` that takes all samples of a prompt."""
    reward_processes: int = 4


def config_of(variant: Variant, folder: Path, serving: Serving = Serving()) -> RunConfig:  # noqa: B008  # frozen
    """The demo with one learner rank, and without a reference model, which would need its own core. A batch is
    generated at once: with fewer groups it takes longer, in a synchronous run too."""
    batch = GROUPS_PER_UPDATE * variant.updates_per_step
    settings = {
        "run": "async-sync",
        "run_dir": str(folder),
        "seed": variant.seed,
        "replay.max_staleness": variant.max_staleness,
        "replay.groups_per_step": batch,
        "rollout.engine.name": variant.engine,
        "rollout.max_concurrent_groups": batch,
        "rollout.reward.function_batch": serving.scores_by_prompt,
        "rollout.reward.num_processes": serving.reward_processes,
        "learner.policy.num_ranks": 1,
        "learner.num_steps": variant.num_steps,
        "learner.minibatches_per_step": variant.updates_per_step,
        "learner.lr": variant.lr,
        "learner.algorithm.kl.placement": "none",
        "learner.algorithm.correction.mode": "decoupled" if variant.is_corrected else "none",
        "learner.checkpoint.every_steps": 1000,
        "weights.snapshot_every_steps": variant.snapshot_every,
        "weights.keep_snapshots": variant.num_steps,
    }
    config = load_config(DEMO, [word for name, value in settings.items() for word in (f"--{name}", str(value))])
    reward = config.rollout.reward.model_copy(update={"function_file": serving.reward_file})
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": ROOT / "examples" / "arithmetic" / "model"}),
            "rollout": config.rollout.model_copy(update={"reward": reward}),
        }
    )


class PinnedRun(LocalRun):
    """Starts the rollout server on one core and the learner, with Ray and its ranks, on another: a child inherits the
    core of the process that starts it."""

    cores: dict[str, int]

    def _start_process(self, name: str, module: str, *arguments: str, stop_timeout_s: float = 20) -> Child:
        everywhere = os.sched_getaffinity(0)
        if name in self.cores:
            os.sched_setaffinity(0, {self.cores[name]})
        try:
            return super()._start_process(name, module, *arguments, stop_timeout_s=stop_timeout_s)
        finally:
            os.sched_setaffinity(0, everywhere)


def two_cores() -> dict[str, int]:
    """The core of the learner and that of the engine."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this benchmark needs two cores: one for the engine, one for the learner")
    return {"learner": cores[0], "rollout-0": cores[1]}


class FollowedClient(PenstockClient):
    """Submits nothing: the run has its own prompts."""

    async def submit(self, prompts: Sequence[Prompt], *_: object, **__: object) -> None:  # type: ignore[override]
        assert prompts


class FollowedRun:
    """A run that others have started, with what `train` uses of a LocalRun."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = folder
        self.config = config
        self.client = FollowedClient.from_run_dir(folder)

    async def check(self) -> None:
        """Whoever has started the run checks it."""

    def pids(self) -> dict[str, int]:
        modules = {"penstock_learner": "learner", "penstock_rollout": "rollout-0"}
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if len(words) > 2 and words[2] in modules and str(self.folder / "config.yaml") in words:
                found[modules[words[2]]] = process.pid
        return found


async def run(variant: Variant, folder: Path, serving: Serving = Serving()) -> dict[str, Any]:  # noqa: B008  # frozen
    """Train. Returns the variant, and the end of each step and the CPU seconds of both sides since the first prompt."""
    config = config_of(variant, folder, serving)
    local = PinnedRun(config)
    local.cores = two_cores()
    async with local:
        return await train(variant, local)


async def train(variant: Variant, local: LocalRun | FollowedRun) -> dict[str, Any]:
    """What `run` returns, of a run that was started."""
    await _wait_until_ready(local)
    before = _cpu_seconds(local)
    started = time.time()
    await asyncio.wait_for(_train(local, _prompts(local.config)), TRAIN_S)
    after = {name: seconds - before[name] for name, seconds in _cpu_seconds(local).items()}
    return row_of(variant, read_steps(local.folder)[: variant.num_steps], started, after)


def row_of(variant: Variant, rows: list[dict[str, float]], started: float, cpu_s: dict[str, float]) -> dict[str, Any]:
    return {
        "variant": asdict(variant),
        "ended_s": [round(row["time"] - started, 3) for row in rows],
        "wait_s": [row["wait_s"] for row in rows],
        "step_s": [row["step_s"] for row in rows],
        "reward": [row["reward_mean"] for row in rows],
        "staleness": [row["staleness_mean"] for row in rows],
        "cpu_s": cpu_s,
    }


async def _wait_until_ready(local: LocalRun | FollowedRun) -> None:
    """Wait for the first policy and for a server that has it."""
    await local.client.wait_for_policy(timeout_s=START_S)
    deadline = time.monotonic() + START_S
    while not any(server.state == "READY" for server in await local.client.servers()):
        await local.check()
        if time.monotonic() > deadline:
            raise SystemExit(f"no server was ready after {START_S:.0f} s; see {local.folder / 'logs'}")
        await asyncio.sleep(POLL_S)


async def _train(local: LocalRun | FollowedRun, prompts: Iterator[Prompt]) -> None:
    """Submit prompts until the last step is trained."""
    num_submitted, asked_at = 0, 0.0
    while _num_trained(local) < local.config.learner.num_steps:
        await local.check()
        if time.monotonic() > asked_at + SUBMIT_EVERY_S:
            asked_at = time.monotonic()
            if (await local.client.get_run()).queue.pending_prompts < SUBMIT_BATCH:
                batch = list(itertools.islice(prompts, SUBMIT_BATCH))
                await local.client.submit(batch, idempotency_key=f"prompts/{num_submitted}")
                num_submitted += len(batch)
        await asyncio.sleep(POLL_S)


def _num_trained(local: LocalRun | FollowedRun) -> int:
    """How many lines metrics.jsonl has: one for each step. They are not parsed, which would take time of a core."""
    path = local.folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _prompts(config: RunConfig) -> Iterator[Prompt]:
    """Endless training prompts, shuffled by the seed. Every sample has its own seed."""
    sampling = Sampling(temperature=config.demo.temperature, max_tokens=config.demo.max_tokens)
    file = ROOT / "examples" / "arithmetic" / "train.parquet"
    problems = list(read_prompts(file, num_samples=config.demo.num_samples, sampling=sampling))
    order = random.Random(config.seed)
    for number in itertools.count():
        if number % len(problems) == 0:
            order.shuffle(problems)
        prompt = problems[number % len(problems)]
        seed = config.seed * 1_000_003 + number * config.demo.num_samples
        yield replace(prompt, sampling=replace(prompt.sampling, seed=seed))


def _cpu_seconds(local: LocalRun | FollowedRun) -> dict[str, float]:
    """CPU seconds of the learner and of the server, with everything that they started."""
    if isinstance(local, FollowedRun):
        pids = local.pids()
    else:
        pids = {child.name: child.process.pid for child in local.processes.children if child.exit_code is None}
    seconds = dict.fromkeys(("learner", "rollout-0"), 0.0)
    for name in seconds.keys() & pids.keys():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            root = psutil.Process(pids[name])
            times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
            seconds[name] = sum(entry.user + entry.system for entry in times)
    return seconds


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    served = given["serving"] | {"reward_file": Path(given["serving"]["reward_file"])}
    outcome = asyncio.run(run(Variant(**given["variant"]), Path(given["folder"]), Serving(**served)))
    Path(given["result"]).write_text(json.dumps(outcome))
