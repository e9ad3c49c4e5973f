"""A rollout server without a model: the real producer, and a maker that waits briefly and makes a numbered group."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry

from penstock.config.rollout import RolloutConfig
from penstock.config.service import RedisConfig
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import Lease
from penstock.store.redis_client import connect
from penstock.trajectory import Group, Prompt
from penstock_rollout.groups.producer import Producer
from penstock_rollout.metrics import RolloutMetrics
from support.chaos.workload import RUN, Settings, make_numbered_group, while_driven


class NumberedGroupMaker:
    """Takes the place of penstock_rollout.groups.producer.GroupMaker."""

    def __init__(self, server_id: str, group_s: tuple[float, float]) -> None:
        self.server_id = server_id
        self.group_s = group_s
        self.random = random.Random(server_id)

    async def make(self, lease: Lease, prompt: Prompt, *_: object) -> Group:
        await asyncio.sleep(self.random.uniform(*self.group_s))
        return make_numbered_group(prompt.token_ids[0], lease, self.server_id)


async def produce(settings: Settings, redis_url: str, server_id: str) -> None:
    client = connect(RedisConfig(url=redis_url, timeout_s=settings.redis_timeout_s))
    producer = Producer(
        RedisReplayQueue(client, RUN, settings.replay_config),
        server_id,
        cast(Any, NumberedGroupMaker(server_id, settings.group_s)),
        RolloutConfig(max_concurrent_groups=settings.concurrent_groups),
        settings.replay_config,
        RolloutMetrics(CollectorRegistry()),
        may_lease=lambda: True,
    )
    loops = [producer.lease_loop(), producer.heartbeat_loop(), producer.reconcile_loop(), while_driven()]
    done, _ = await asyncio.wait([asyncio.ensure_future(loop) for loop in loops], return_when=asyncio.FIRST_COMPLETED)
    for loop in done:
        loop.result()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--server-id", required=True)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    # A restarted server is a new one: its memory, and with it its leases, are gone.
    server_id = f"{arguments.server_id}-{os.getpid()}"
    asyncio.run(produce(Settings.load(arguments.settings), arguments.redis_url, server_id))
    return 0


if __name__ == "__main__":
    sys.exit(main())
