"""Finishes what nobody else will: tasks of dead workers, tasks past their deadline, and groups of dead gateways.

Every gateway does this about once a second, Each step is atomic or can be repeated, so it
does not matter how many do."""

from __future__ import annotations

import asyncio
import logging

from redis.exceptions import RedisError

from penstock.errors import PenstockError
from penstock_services.gateway.served_run import ServedRun
from penstock_services.gateway.served_runs import ServedRuns

logger = logging.getLogger(__name__)
SWEEP_S = 1.0
"""Time between two sweeps."""


async def sweep(served: ServedRuns) -> None:
    """Sweep until the gateway stops. Errors of Redis are logged, and the next sweep tries again."""
    while not served.stopping.is_set():
        try:
            async with asyncio.timeout(4 * served.config.redis.timeout_s):
                await sweep_run(served.run)
        except (PenstockError, RedisError, TimeoutError) as error:
            logger.warning("sessions and tasks of run %s were not swept: %s", served.config.run, error)
        try:
            async with asyncio.timeout(SWEEP_S):
                await served.stopping.wait()
        except TimeoutError:
            continue


async def sweep_run(run: ServedRun) -> None:
    """Return the places of dead workers, complete overdue tasks, and append groups that are due."""
    num_reclaimed, num_due = await run.tasks.tasks.sweep()
    if num_reclaimed or num_due:
        logger.info("returned %d places of lost workers, completed %d overdue tasks", num_reclaimed, num_due)
    for name in await run.generation.rewards.store.due():
        try:
            await run.generation.rewards.finish(name)
        except PenstockError as error:
            logger.warning("%s is not yet in the queue: %s", name, error)
