"""The process `penstock feed`: the feeder and the validator of a run, over one connection."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial

from prometheus_client import REGISTRY

from penstock.cancellation import end_task, to_the_end
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, Conflict
from penstock.feed.dataset_feed import Curriculum, Feeder, PromptStream
from penstock.feed.run_end import EarlierWork, RunEnd, earlier_work, plan_line
from penstock.feed.validation import Validator, VersionHold
from penstock.metrics import write_endpoint
from penstock.process_endpoint import Readiness, process_endpoint
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, PolicyRegistry, RunControl
from penstock.store.heartbeats import VALIDATOR, Heartbeats
from penstock.store.redis_client import check_primary, connect
from penstock.tracing import open_tracing

FEED = "feed"
"""Name of the process and of its log."""
LAST_CALL_S = 10.0


def feed_file(config: RunConfig) -> str:
    """Name of the feed's files in the run's folder. Each dataset has its own: a run may have several feeds."""
    return f"{FEED}-{config.dataset.name}"


def check_fed(config: RunConfig) -> None:
    if config.dataset.file is None and config.dataset.validation.file is None:
        raise ConfigError("dataset.file is not set; give the data to feed")


async def feed_run(config: RunConfig, *, watch: bool = False) -> None:
    """Submit all of `dataset.file`, and validate meanwhile. With a validation file or `watch`, stay until the run has
    finished.

    Both files are read before anything is submitted, so unreadable data is an error at the start."""
    check_fed(config)
    dataset = config.dataset
    async with AsyncExitStack() as stack:
        stack.enter_context(_only_feed(config))
        endpoint = stack.enter_context(process_endpoint(REGISTRY, dataset.metrics_host, dataset.metrics_port))
        endpoint.readiness = lambda: Readiness("loading", "reads the dataset")
        client = connect(config.redis)
        stack.push_async_callback(client.aclose)
        await check_primary(client)
        queue = RedisReplayQueue(client, config.run, config.replay)
        tracing = open_tracing(config.tracing, "feed", config.run)
        stack.callback(tracing.close)
        stream = None
        if dataset.file is not None and not dataset.validation.only:
            stream = await asyncio.to_thread(PromptStream.read, config)
        epoch_prompts = 0 if stream is None else stream.epoch_prompts
        stack.callback(_print_plan(config, epoch_prompts, await earlier_work(queue, config), endpoint.port))
        validator = None
        if dataset.validation.file is not None:
            hold = VersionHold(
                PolicyRegistry(client, config.run), Fleet(client, config.run), config.folder / "validation.pinned",
                max_silence_s=config.replay.lease_ttl_s, num_servers=config.rollout.num_servers,
                join_timeout_s=config.rollout.start_timeout_s,
            ) if dataset.validation.pinned else None  # fmt: skip
            validator = await asyncio.to_thread(Validator.read, config, queue, hold)
        control = RunControl(client, config.run)
        tasks = []
        if validator is not None:
            patient = connect(config.redis, patient=True)
            stack.push_async_callback(patient.aclose)
            heartbeats = Heartbeats(patient, config.run)
            tasks.append(asyncio.create_task(_validate(validator, heartbeats), name=VALIDATOR))
        if stream is not None:
            curriculum = Curriculum.open(config, queue, len(stream.prompts))
            feeder = Feeder(queue, stream, tracing, control.pause, config.replay.loss_window_s, curriculum)
            is_over = RunEnd(queue, config).is_reached if watch else None
            tasks.append(asyncio.create_task(_feed(feeder, is_over), name="feeder"))
        for task in tasks:
            stack.push_async_callback(end_task, task)
        endpoint.readiness = lambda: Readiness("ready")
        try:
            # Unlike `gather`, `wait` itself ends when it is cancelled, even if a task swallows its own cancellation.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            endpoint.readiness = lambda: Readiness("draining", "ends its last submission")


@contextmanager
def _only_feed(config: RunConfig) -> Iterator[None]:
    """Raise Conflict if another process feeds the same dataset to the run. The lock ends with its process."""
    name = config.dataset.name
    config.folder.mkdir(parents=True, exist_ok=True)
    with (config.folder / f"{feed_file(config)}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise Conflict(
                f"process {file.read().strip() or 'unknown'} feeds dataset {name!r} to run {config.run} already, as "
                "`penstock up` does by itself; to feed another one too, give --dataset.name NAME --dataset.file FILE"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _print_plan(config: RunConfig, epoch_prompts: int, earlier: EarlierWork, port: int) -> Callable[[], None]:
    """Print what the run will do, and write it to `feed-DATASET.json`, which `penstock up` reads. Returns what removes
    the port from that file at the end."""
    if epoch_prompts == 0 and not config.dataset.validation.only:
        return lambda: None
    plan = plan_line(config, epoch_prompts, earlier)
    print(plan, flush=True)
    write_endpoint(config.folder, feed_file(config), plan=plan, host=config.dataset.metrics_host, metrics_port=port)
    return partial(write_endpoint, config.folder, feed_file(config), plan=plan)


async def _validate(validator: Validator, heartbeats: Heartbeats) -> None:
    """Validate with a heartbeat, by which the learner knows that it can wait for the last validation."""
    try:
        async with heartbeats.beating(VALIDATOR):
            await validator.run()
    except asyncio.CancelledError:
        await to_the_end(heartbeats.end(VALIDATOR), LAST_CALL_S)
        raise


async def _feed(feeder: Feeder, is_over: Callable[[], Awaitable[bool]] | None) -> None:
    num_prompts = await feeder.run()
    print(f"all {num_prompts} prompts of dataset {feeder.config.name!r} are submitted", flush=True)
    if is_over is not None:
        await feeder.watch(is_over)
