"""The rollout server process: one engine, and the loops that lease prompts, append groups and follow versions.

| loop      | file                  | what it does                                                     |
|-----------|-----------------------|------------------------------------------------------------------|
| lease     | `groups/producer.py`  | leases prompts; a task per prompt makes the group and appends it |
| heartbeat | `groups/producer.py`  | renews the leases                                                |
| reconcile | `groups/producer.py`  | drops groups that are done, and appends again what Redis lost    |
| report    | `fleet/membership.py` | reports to the fleet, and follows the wanted version             |
| health    | here                  | ends the server if its engine fails                              |
| notices   | `store/notices.py`    | tells the run's users of failed rewards and prompts              |

Pushed versions arrive at `fleet/weight_member.py`, requests of clients at `generate_service.py`. Both are gRPC services
on the internal listener.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from functools import partial

from prometheus_client import REGISTRY

from penstock.cancellation import end_task
from penstock.config.run import RunConfig
from penstock.errors import Unavailable
from penstock.metrics import serve_metrics, write_endpoint
from penstock.ports import is_loopback, keep_collectives_on_loopback
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.fleet import Fleet
from penstock.store.heartbeats import Heartbeats
from penstock.store.notices import NoticeBoard, Notices
from penstock.store.phases import Phases
from penstock.store.policies import PolicyRegistry
from penstock.store.redis_client import connect
from penstock.store.run_control import RunControl
from penstock.tracing import open_tracing
from penstock.v1 import generate_pb2_grpc, weights_pb2_grpc
from penstock.weights.cluster_key import ClusterKey
from penstock_rollout.agents.registry import Agents
from penstock_rollout.engines.factory import check_takes_updates, create_engine, resolve_engine_name, start_engine
from penstock_rollout.fleet.internal_listener import make_listener
from penstock_rollout.fleet.membership import FleetMembership
from penstock_rollout.fleet.weight_member import WeightMember
from penstock_rollout.generate_service import GenerateService
from penstock_rollout.groups.group_maker import GroupMaker
from penstock_rollout.groups.producer import Producer
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.start_check import check_address
from penstock_rollout.text.prompt_length import PromptLength
from penstock_rollout.text.tokenization import Tokenization

logger = logging.getLogger(__name__)
HEALTH_S = 2.0
LAST_PUSH_S = 20.0
"""How long a server that is leaving waits for a push in progress."""
CLOSE_S = 1.0
"""How long the listener waits for requests in progress when the server ends."""


class RolloutServer:
    """The parts of one server, and the order in which they start and stop."""

    def __init__(self, config: RunConfig, server_id: str) -> None:
        rollout, max_model_len = config.rollout, config.rollout.engine.max_model_len
        self.config = config
        self.server_id = server_id
        self.stopping = asyncio.Event()
        self.metrics = RolloutMetrics(REGISTRY)
        self.engine = create_engine(
            rollout.engine, config.model.path, config.model.dtype, config.seed,
            report_experts=config.learner.router.replay,
        )  # fmt: skip
        self.client = connect(config.redis)
        self.notices = NoticeBoard(Notices(self.client, config.run))
        self.scorer = Scorer(rollout.reward, self.metrics, self.notices.post)
        prompt_length = PromptLength(rollout.prompt, max_model_len, self.metrics)
        tokenization = Tokenization(config.model.path, prompt_length.fit)
        agents = Agents.load(rollout.agents, max_model_len, tokenization)
        self.tracing = open_tracing(config.tracing, "rollout", config.run)
        self.heartbeats, self.phases = Heartbeats(self.client, config.run), Phases(self.client, config.run)
        fleet = Fleet(self.client, config.run)
        self.weight_member = WeightMember(config.run, self.engine, self.metrics, fleet.term)
        self.membership = FleetMembership(
            config, server_id, self.engine, fleet, PolicyRegistry(self.client, config.run),
            RunControl(self.client, config.run), self.weight_member, self.metrics,
            partial(self.phases.enter, server_id, "serving"),
        )  # fmt: skip
        maker = GroupMaker(
            config.run, server_id, self.engine, tokenization, self.scorer, self.metrics, agents,
            greedy_baseline=config.learner.algorithm.advantage.has_baseline, tracing=self.tracing,
        )  # fmt: skip
        self.producer = Producer(
            RedisReplayQueue(self.client, config.run, config.replay), server_id, maker, rollout, config.replay,
            self.metrics, may_lease=self.membership.may_lease, engine_stats=self.engine.stats, tracing=self.tracing,
            post=self.notices.post,
        )  # fmt: skip
        generation = GenerateService(config.run, server_id, self.engine, tokenization, max_model_len)
        self.listener = make_listener(ClusterKey.of(config))
        weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(self.weight_member, self.listener)
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(generation, self.listener)

    async def run(self) -> None:
        """Serve until `stopping` is set. Then drain, leave the fleet and stop the engine."""
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(asyncio.to_thread, self.tracing.close)
            closing.push_async_callback(self.client.aclose)
            closing.push_async_callback(self.scorer.close)
            closing.push_async_callback(self.engine.stop)
            closing.push_async_callback(self.listener.stop, grace=CLOSE_S)
            closing.push_async_callback(self._leave)
            await self.phases.enter(self.server_id, "checking the rewards", is_first=True)
            await self.scorer.check()
            await self.phases.enter(self.server_id, f"starting the {self.engine.name} engine and loading the model")
            await start_engine(self.engine, self.config.rollout.start_timeout_s)
            await self.phases.enter(self.server_id, "joining the fleet and waiting for the current weights")
            self.metrics.version.labels("rollout").set(0)
            await self.membership.join(await self._listen())
            await self.heartbeats.count_start(self.server_id)
            await self._serve()

    async def _listen(self) -> str:
        """Start the internal listener and the metrics endpoint. Returns the address for other processes."""
        rollout = self.config.rollout
        try:
            port = self.listener.add_insecure_port(f"{rollout.host}:{rollout.port}")
        except RuntimeError as error:
            raise Unavailable(
                f"port {rollout.port} on {rollout.host} is in use; set rollout.port to a free one or 0"
            ) from error
        await self.listener.start()
        metrics_port = serve_metrics(REGISTRY, rollout.host, rollout.metrics_port)
        write_endpoint(self.config.folder, self.server_id, host=rollout.host, port=port, metrics_port=metrics_port)
        return f"{rollout.advertise_host or rollout.host}:{port}"

    async def _serve(self) -> None:
        """Run the loops until `stopping` is set. A loop that fails ends the server."""
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(loop, name=name)
                for name, loop in (
                    ("lease", self.producer.lease_loop()),
                    ("heartbeat", self.producer.heartbeat_loop()),
                    ("reconcile", self.producer.reconcile_loop()),
                    ("report", self._report_loop()),
                    ("health", self._health_loop()),
                    ("notices", self.notices.write_loop()),
                )
            ]
            await self.stopping.wait()
            await asyncio.gather(*(end_task(task) for task in loops))

    async def _report_loop(self) -> None:
        await self.membership.report_loop(lambda: self.producer.num_running, lambda: self.scorer.num_scoring)

    async def _health_loop(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            await self.engine.check_health()

    async def _leave(self) -> None:
        """Give back unfinished prompts and leave the fleet, so that no further push counts on this server.

        Then wait for a push in progress: if one member disappears, all members have to start it again."""
        try:
            await self.producer.drain()
            await self.membership.leave()
            await self.weight_member.wait_for_push(LAST_PUSH_S)
        except Exception as error:
            logger.warning("could not leave the fleet: %s", error)


async def serve(config: RunConfig, server_id: str) -> None:
    """Run a server until SIGTERM or SIGINT."""
    check_address(config)
    check_takes_updates(resolve_engine_name(config.rollout.engine), config.model.path)
    ClusterKey.of(config).make_if_missing()
    if is_loopback(config.rollout.host):
        keep_collectives_on_loopback()
    server = RolloutServer(config, server_id)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stopping.set)
    await server.run()
