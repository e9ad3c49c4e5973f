"""Runs a real learner process on made-up groups. There is no rollout server: the test is the producer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from penstock.codec import encode_group
from penstock.config.loading import dump_config, validate
from penstock.config.run import RunConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import QueueStat
from penstock.store.fleet import PolicyRegistry
from penstock.store.keys import RunKeys
from penstock.store.redis_client import connect
from penstock.trajectory import Group
from penstock_learner.checkpoints import shards_folder
from support.groups import make_group
from support.processes import LISTING_S, command_of

GROUPS_PER_STEP = 2
NUM_STEPS = 4
KILLED = -9
"""The exit code of a learner that has died at a crash point."""


@dataclass(frozen=True)
class Outcome:
    """The results of a finished run."""

    digests: dict[int, str]
    """Weights digest by step, of the newest version made at that step."""
    losses: list[float]
    critic_losses: list[float]
    """Empty without a critic."""
    rewards: list[float]
    """Mean reward of each step."""
    stat: QueueStat
    ledger: list[list[int]]
    feed_positions: dict[str, int]
    state_hashes: dict[str, str]
    """By trained role, in the newest checkpoint: a hash of weights, optimizer and random state."""


def make_config(folder: Path, model: Path, redis_url: str, run: str, **learner: Any) -> RunConfig:
    return validate(
        {
            "run": run,
            "run_dir": str(folder),
            "model": {"path": str(model)},
            "redis": {"url": redis_url},
            "replay": {"groups_per_step": GROUPS_PER_STEP, "max_staleness": 100},
            "learner": {
                "num_steps": NUM_STEPS,
                "lr": 1e-3,
                "checkpoint": {"every_steps": 2},
                "algorithm": {"correction": {"mode": "bypass"}, "kl": {"placement": "none"}},
                "batch_timeout_s": 180,
                "rank_timeout_s": 180,
                "max_logprob_mismatch_nats": 0,  # the groups are made up, and so are their log-probs
                **learner,
            },
        },
        "test",
    )


def ppo(classifier: Path, num_ranks: int = 2) -> dict[str, Any]:
    """Learner settings of PPO with a critic, rules and a reward model, and two updates per step. The policy is not
    updated in the first step."""
    return {
        "algorithm": {"advantage": {"name": "gae", "lam": 0.95}, "kl": {"placement": "none"}},
        "critic": {"num_ranks": num_ranks, "lr": 1e-3},
        "reward_model": {"path": str(classifier), "combine": "add", "coefficient": 0.1},
        "policy": {"num_ranks": num_ranks},
        "critic_warmup_steps": 2,
        "minibatches_per_step": 2,
    }


async def fill_queue(
    config: RunConfig, num_groups: int = GROUPS_PER_STEP * NUM_STEPS, make: Callable[[int], Group] = make_group
) -> None:
    """Submit prompts and append their groups in order, as a rollout server would."""
    await feed_prompts(config, num_groups)
    await append_groups(config, num_groups, make)


async def feed_prompts(config: RunConfig, num_prompts: int) -> None:
    client = connect(config.redis)
    queue = RedisReplayQueue(client, config.run, config.replay)
    await queue.feed("train", "fingerprint", 0, [b""] * num_prompts, [0] * num_prompts)
    await client.aclose()


async def append_groups(config: RunConfig, num_groups: int, make: Callable[[int], Group] = make_group) -> None:
    """Append the groups of the next prompts."""
    client = connect(config.redis)
    queue = RedisReplayQueue(client, config.run, config.replay)
    for lease in await queue.lease("rollout-0", num_groups):
        await queue.append(lease, encode_group(make(lease.prompt_id)), 0)
    await client.aclose()


async def forget_run(config: RunConfig) -> None:
    """Delete the run from Redis, as if its disk was lost."""
    client = connect(config.redis)
    async for key in client.scan_iter(f"{RunKeys(config.run).prefix}*"):
        await client.delete(key)
    await client.aclose()


def run_learner(
    config: RunConfig, crash_at: str = "", interfere: Callable[[list[psutil.Process]], bool] | None = None
) -> tuple[int, str]:
    """Run a learner process to its end. Returns its exit code and output.

    `interfere` is called repeatedly with the learner's descendants, until it returns true. Processes that Ray leaves
    behind a killed learner are ended too."""
    config.folder.mkdir(parents=True, exist_ok=True)
    path = config.folder / "config.yaml"
    path.write_text(dump_config(config))
    log = config.folder / "learner.log"
    command = [sys.executable, "-m", "penstock_learner", "--config", str(path)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"PENSTOCK_CRASH_AT": crash_at}
        )
    descendants: dict[int, psutil.Process] = {}
    listed_at = -LISTING_S
    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired, psutil.NoSuchProcess):
                if time.monotonic() > listed_at + LISTING_S:
                    listed_at = time.monotonic()
                    descendants |= {p.pid: p for p in psutil.Process(process.pid).children(recursive=True)}
                if interfere is not None and interfere(list(descendants.values())):
                    interfere = None
                process.wait(0.2)
        return process.returncode, log.read_text()
    finally:
        process.kill()
        process.wait()
        for leftover in descendants.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                leftover.kill()


def ranks_of(worker: str, processes: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that are a rank of the role, by the name of its worker class."""
    return [process for process in processes if f"ray::{worker}" in " ".join(command_of(process))]


def queue_stat(config: RunConfig) -> QueueStat:
    async def ask() -> QueueStat:
        client = connect(config.redis)
        stat = await RedisReplayQueue(client, config.run, config.replay).stat()
        await client.aclose()
        return stat

    return asyncio.run(ask())


def outcome(config: RunConfig) -> Outcome:
    return asyncio.run(_outcome(config))


async def _outcome(config: RunConfig) -> Outcome:
    client = connect(config.redis)
    policies = await PolicyRegistry(client, config.run).newest_first(None, 100)
    stat = await RedisReplayQueue(client, config.run, config.replay).stat()
    await client.aclose()
    digests: dict[int, str] = {}
    for policy in policies:
        digests.setdefault(policy.step, policy.weights_digest)
    lines = (config.folder / "metrics.jsonl").read_text().splitlines()
    newest = sorted((config.folder / "checkpoints").glob("term-*-step-*"))[-1]
    trainer = json.loads((newest / "trainer.json").read_text())
    steps = [json.loads(line) for line in lines]
    return Outcome(
        digests,
        [step["loss"] for step in steps],
        [step["critic_loss"] for step in steps if "critic_loss" in step],
        [step["reward_mean"] for step in steps],
        stat,
        trainer["ledger"],
        trainer["feed_positions"],
        {role: state_hash(shards_folder(newest, role)) for role in _trained_roles(config)},
    )


def _trained_roles(config: RunConfig) -> list[str]:
    """The roles that train."""
    return ["policy", *(["critic"] if config.learner.critic is not None else [])]


def checkpoint_state(folder: Path) -> dict[str, Any]:
    """Everything that the ranks of a role have in a checkpoint, whatever their number: `model`, `optimizer`, `rng`."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(state, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert state.keys() == {"model", "optimizer", "rng"}, state.keys()
    return state


def state_hash(folder: Path) -> str:
    import torch

    state, digest = checkpoint_state(folder), hashlib.sha256()
    for name, value in sorted(_leaves(state)):
        digest.update(name.encode())
        digest.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return digest.hexdigest()


def _leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    entries = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else None
    if entries is None:
        yield name, state
        return
    for key, value in entries:
        yield from _leaves(value, f"{name}.{key}")
