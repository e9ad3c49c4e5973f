"""The process `penstock feed`: the feeder and the validator of a run, over one connection."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import redis.asyncio as redis

from penstock.cancellation import end_task
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.feed.dataset_feed import Feeder, PromptStream
from penstock.feed.validation import Validator
from penstock.feed.version_hold import VersionHold
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.fleet import Fleet
from penstock.store.policies import PolicyRegistry
from penstock.store.redis_client import connect
from penstock.store.run_control import RunControl
from penstock.tracing import Tracing, open_tracing


def check_fed(config: RunConfig) -> None:
    if config.dataset.file is None and config.dataset.validation.file is None:
        raise ConfigError("dataset.file is not set; give the data to feed")


async def feed_run(config: RunConfig) -> None:
    """Submit all of `dataset.file`. With a `dataset.validation.file`, validate meanwhile, and go on until cancelled.

    Both files are read before anything is submitted, so unreadable data is an error at the start."""
    check_fed(config)
    dataset = config.dataset
    async with AsyncExitStack() as stack:
        client = connect(config.redis)
        stack.push_async_callback(client.aclose)
        queue = RedisReplayQueue(client, config.run, config.replay)
        tracing = open_tracing(config.tracing, "feed", config.run)
        stack.callback(tracing.close)
        stream = None
        if dataset.file is not None:
            stream = await asyncio.to_thread(PromptStream.read, config)
        validator = None
        if dataset.validation.file is not None:
            hold = _version_hold(config, client) if dataset.validation.pinned else None
            validator = await asyncio.to_thread(Validator.read, config, queue, hold)
        control = RunControl(client, config.run)
        tasks = []
        if validator is not None:
            tasks.append(asyncio.create_task(validator.run(), name="validator"))
        if stream is not None:
            tasks.append(asyncio.create_task(_feed(queue, stream, tracing, control), name="feeder"))
        for task in tasks:
            stack.push_async_callback(end_task, task)
        await asyncio.gather(*tasks)


def _version_hold(config: RunConfig, client: redis.Redis) -> VersionHold:
    return VersionHold(
        PolicyRegistry(client, config.run),
        Fleet(client, config.run),
        config.folder / "validation.pinned",
        max_silence_s=config.replay.lease_ttl_s,
        num_servers=config.rollout.num_servers,
        join_timeout_s=config.rollout.start_timeout_s,
    )


async def _feed(queue: RedisReplayQueue, stream: PromptStream, tracing: Tracing, control: RunControl) -> None:
    num_prompts = await Feeder(queue, stream, tracing, control.pause).run()
    print(f"all {num_prompts} prompts of dataset {stream.config.name!r} are submitted", flush=True)
