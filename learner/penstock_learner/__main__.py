"""The learner process: `python -m penstock_learner --config run.yaml [--check]`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from penstock.cli.parser import parse_with_overrides, process_parser
from penstock.errors import PenstockError, RayDied
from penstock.logs import setup_logging

if TYPE_CHECKING:
    from penstock.config.run import RunConfig
    from penstock_learner.loop.process import LearnerController

logger = logging.getLogger("penstock_learner")


def main(argv: Sequence[str] | None = None) -> int:
    about = "Run the learner, which trains on the sampled groups. `penstock up` starts it with the others."
    parser = process_parser("learner", about, "--learner.lr 1e-6")
    parser.add_argument("--no-ray", action="store_true", help="with --check, do not look at the Ray cluster")
    arguments, overrides = parse_with_overrides(parser, argv)
    from penstock.config.loading import load_config
    from penstock.hub import with_local_models
    from penstock.internal_calls import ClusterKey, check_certificates
    from penstock.machine import keep_compiled_code, keep_files_private
    from penstock.start_checks import make_run_folder

    try:
        config = load_config(arguments.config, overrides)
        setup_logging("learner", config.run)
        config = with_local_models(config)
        if arguments.check:
            from penstock_learner.start_check import check

            print(f"{arguments.config}: ok (learner, {check(config, with_ray=not arguments.no_ray)})")
            return 0
        keep_files_private()
        make_run_folder(config)
        keep_compiled_code(config.cache_folder)
        ClusterKey.of(config).make_if_missing()
        check_certificates(config.tls)
        asyncio.run(serve(config))
    except PenstockError as error:
        print(f"penstock learner: error: {error}", file=sys.stderr, flush=True)
        if isinstance(error, RayDied):
            os._exit(1)  # Ray's exit handlers would wait for what has died, and then print a stack trace
        return 1
    return 0


async def serve(config: RunConfig) -> None:
    """Start Ray, place the roles and train. Stops everything that it started before it returns.

    Ray starts in processes of its own, for which this one waits. The controller and torch are imported meanwhile, so
    nothing that is imported before imports torch."""
    prepare_environment(config)
    from prometheus_client import CollectorRegistry

    from penstock.machine import collecting_rarely, warn_of_plain_links
    from penstock.metrics import write_endpoint
    from penstock.process_endpoint import Readiness, process_endpoint
    from penstock.replay.queue import RedisReplayQueue
    from penstock.store.fleet import Fleet
    from penstock.store.heartbeats import LEARNER, Heartbeats, Leaving, Phases
    from penstock.store.redis_client import check_primary, connect
    from penstock.tracing import open_tracing
    from penstock_learner.loggers.step_loggers import check_loggers
    from penstock_learner.metrics import LearnerMetrics
    from penstock_learner.roles.profiling import check_profiler
    from penstock_learner.roles.ray_cluster import (
        place_roles,
        ray_cluster,
        remove_abandoned_folders,
        run_while_ray_lives,
    )
    from penstock_learner.roles.role_group import run_with_ranks

    learner = config.learner
    check_loggers(learner.loggers)
    check_profiler(learner)
    warn_of_plain_links("learner.publish_host", learner.publish_host or "127.0.0.1", "pushed weights")
    metrics = LearnerMetrics(CollectorRegistry(), learner.placement)
    roles, stopping = learner.needed_roles, asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        endpoint = stack.enter_context(process_endpoint(metrics.registry, learner.metrics_host, learner.metrics_port))
        write_endpoint(config.folder, "learner", host=learner.metrics_host, metrics_port=endpoint.port)
        tracing = stack.enter_context(contextlib.closing(open_tracing(config.tracing, "learner", config.run)))
        client = connect(config.redis, patient=True)
        stack.push_async_callback(client.aclose)
        await check_primary(client)
        await stack.enter_async_context(Leaving(client, config.run, LEARNER).holding(stopping))
        heartbeats, phases = Heartbeats(client, config.run), Phases(client, config.run)
        silence_s = await stack.enter_async_context(heartbeats.beating(LEARNER))
        endpoint.readiness = lambda: Readiness("loading", phases.newest)
        await asyncio.to_thread(remove_abandoned_folders)
        await phases.enter(LEARNER, "starting or joining Ray", is_first=True)
        importing = asyncio.get_running_loop().run_in_executor(None, import_module, "penstock_learner.loop.process")
        # Ray's start blocks this thread.
        with heartbeats.beating_in_thread(LEARNER, lambda: connect(config.redis)), collecting_rarely():
            stack.enter_context(ray_cluster(config, roles))
        logger.info("Ray is ready")
        await phases.enter(LEARNER, f"placing the ranks of {', '.join(roles)}")

        async def train() -> None:
            groups = await place_roles(config, roles, timeout_s=learner.rank_timeout_s)
            queue, fleet = RedisReplayQueue(client, config.run, config.replay), Fleet(client, config.run)
            controller: LearnerController = (await importing).LearnerController(
                config, queue, fleet, groups, metrics, silence_s, tracing
            )
            endpoint.readiness = controller.readiness
            controller.stopping = stopping
            for name in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(name, stopping.set)
            await run_with_ranks(controller.run(), groups.values(), stopping)

        await run_while_ray_lives(train())
        logger.info("finished")


def prepare_environment(config: RunConfig) -> None:
    """Turn off telemetry and downloads, and set the threads per rank, before ray is imported. A private Ray gets a
    token, and listens on loopback only, as do the process groups of its ranks. A joined cluster has its own
    settings."""
    from penstock.machine import is_loopback, keep_collectives_on_loopback

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["HF_HUB_OFFLINE"] = "1"  # the models are local by now, and ranks make no network calls
    os.environ["OMP_NUM_THREADS"] = str(config.learner.threads_per_rank)
    if config.learner.profile.ray_timeline:
        os.environ["RAY_PROFILING"] = "1"
    if not config.learner.ray_address:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Ray would start a process per CPU in advance and end it unused, because ranks get their own.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default ranks would wait for all else on busy CPUs
        # On Linux, Ray replaces the address 127.0.0.1 with that of another interface, and then listens on all of them,
        # unless this says that the node belongs to no cluster.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if is_loopback(config.learner.publish_host or "127.0.0.1"):
            keep_collectives_on_loopback()


if __name__ == "__main__":
    raise SystemExit(main())
