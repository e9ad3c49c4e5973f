"""The rollout server process: one engine, and the loops that lease prompts, append groups and follow versions.

| loop      | file                  | what it does                                                     |
|-----------|-----------------------|------------------------------------------------------------------|
| lease     | `groups/producer.py`  | leases prompts; a task per prompt makes the group and appends it |
| heartbeat | `groups/producer.py`  | renews the leases                                                |
| reconcile | `groups/producer.py`  | drops groups that are done, and appends again what Redis lost    |
| save      | `groups/token_saver.py` | saves the tokens of unfinished groups                          |
| report    | `fleet/membership.py` | reports to the fleet, and follows the wanted version             |
| health    | here                  | ends the server if its engine fails                              |
| notices   | `store/notices.py`    | tells the run's users of failed rewards and prompts              |

Pushed versions arrive at `fleet/weight_member.py`, requests of clients at `serving/generate_service.py`. Both are gRPC
services on the internal listener.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import traceback
from functools import partial

from prometheus_client import REGISTRY

from penstock.api_keys import OWN_KEY_FILE
from penstock.cancellation import end_task
from penstock.config.run import RunConfig
from penstock.errors import PenstockError, Unavailable, described, first_error
from penstock.key_files import SINGLE_KEY_NAME, KeyFile
from penstock.machine.ports import is_loopback, keep_collectives_on_loopback
from penstock.metrics import write_endpoint
from penstock.process_endpoint import ProcessEndpoint, Readiness
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.fleet import Fleet
from penstock.store.heartbeats import Heartbeats
from penstock.store.leaving import Leaving
from penstock.store.notices import Event, NoticeBoard, Notices
from penstock.store.phases import Phases
from penstock.store.policies import PolicyRegistry
from penstock.store.redis_client import connect
from penstock.tracing import open_tracing
from penstock.v1 import generate_pb2_grpc, weights_pb2_grpc
from penstock.weights.cluster_key import ClusterKey
from penstock_rollout.agents.registry import Agents
from penstock_rollout.engines.factory import check_serves_model, create_engine, resolve_engine_name, start_engine
from penstock_rollout.fleet.internal_listener import make_listener
from penstock_rollout.fleet.membership import FleetMembership
from penstock_rollout.fleet.weight_member import WeightMember
from penstock_rollout.groups.group_maker import GroupMaker
from penstock_rollout.groups.peer_rows import PeerRows
from penstock_rollout.groups.producer import Producer
from penstock_rollout.groups.token_saver import TokenSaver
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.serving.generate_service import GenerateService
from penstock_rollout.serving.tool_calling import ToolCalling
from penstock_rollout.start_check import check_address
from penstock_rollout.tokenization import PromptLength, Tokenization

logger = logging.getLogger(__name__)
HEALTH_S = 2.0
LAST_PUSH_S = 20.0
"""How long a server that is leaving waits for a push in progress."""
SHOWN_FRAMES = 6
"""Lines of the traceback in the notice of a server that ends: the newest frames, and the error."""
CLOSE_S = 1.0
"""How long the listener waits for requests in progress when the server ends."""


class RolloutServer:
    """The parts of one server, and the order in which they start and stop."""

    def __init__(self, config: RunConfig, server_id: str) -> None:
        rollout, max_model_len = config.rollout, config.rollout.engine.max_model_len
        self.config = config
        self.server_id = server_id
        self.stopping = asyncio.Event()
        self._closing = contextlib.AsyncExitStack()
        self.metrics = RolloutMetrics(REGISTRY)
        self.endpoint = ProcessEndpoint(REGISTRY)
        self.engine = create_engine(
            rollout.engine, config.model.path, config.model.dtype, config.seed,
            report_experts=config.learner.router.replay,
        )  # fmt: skip
        self.metrics.info.labels(server_id, self.engine.name).set(1)
        self.metrics.follow_engine(self._generating_s)
        self.client = connect(config.redis)
        self.notices = NoticeBoard(Notices(self.client, config.run))
        self.scorer = Scorer(rollout.reward, self.metrics, self.notices.post)
        prompt_length = PromptLength(rollout.prompt, max_model_len, self.metrics)
        tokenization = Tokenization(config.model.path, prompt_length.fit, config.rollout.prompt.template_arguments)
        self.agents = Agents.load(rollout.agents, max_model_len, tokenization)
        self.tracing = open_tracing(config.tracing, "rollout", config.run)
        self.heartbeats, self.phases = Heartbeats(self.client, config.run), Phases(self.client, config.run)
        fleet = Fleet(self.client, config.run)
        self.weight_member = WeightMember(config.run, self.engine, self.metrics, fleet.term)
        self.membership = FleetMembership(
            config, server_id, self.engine, fleet, PolicyRegistry(self.client, config.run), self.weight_member,
            self.metrics,
            partial(self.phases.enter, server_id, "serving"),
        )  # fmt: skip
        queue = RedisReplayQueue(self.client, config.run, config.replay)
        self.saver = TokenSaver(
            queue, self.engine, server_id, self.metrics, rollout.save_every_tokens, config.replay.max_staleness
        )  # fmt: skip
        self.peers = PeerRows(
            config.run, server_id, fleet, ClusterKey.of(config), self.metrics, rollout.engine.max_num_seqs,
            rollout.prompt_timeout_s,
        )  # fmt: skip
        maker = GroupMaker(
            config.run, server_id, self.engine, tokenization, self.scorer, self.metrics, self.agents,
            greedy_baseline=config.learner.algorithm.advantage.has_baseline, tracing=self.tracing,
            saver=self.saver,
            peers=self.peers if rollout.spread_groups and not config.learner.router.replay else None,
        )  # fmt: skip
        self.producer = Producer(
            queue, server_id, maker, rollout, config.replay,
            self.metrics, may_lease=self.membership.may_lease, engine_stats=self.engine.stats, tracing=self.tracing,
            post=self.notices.post, reward_model=config.learner.reward_model,
            saver=self.saver,
        )  # fmt: skip
        tool_calling = ToolCalling.of(rollout, self.engine.name, tokenization)
        generation = GenerateService(config.run, server_id, self.engine, tokenization, max_model_len, tool_calling)
        self.generation = generation
        self.listener = make_listener(ClusterKey.of(config))
        weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(self.weight_member, self.listener)
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(generation, self.listener)

    async def run(self) -> None:
        """Serve until `stopping` is set. Then drain, leave the fleet and stop the engine."""
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(self.endpoint.close)
            closing.push_async_callback(asyncio.to_thread, self.tracing.close)
            closing.push_async_callback(self.client.aclose)
            leaving = Leaving(self.client, self.config.run, self.server_id)
            await closing.enter_async_context(leaving.holding(self.stopping))
            closing.push_async_callback(self.scorer.close)
            closing.push_async_callback(self.peers.close)
            closing.push_async_callback(self.agents.close)
            closing.push_async_callback(self.engine.stop)
            closing.push_async_callback(self.listener.stop, grace=CLOSE_S)
            await closing.enter_async_context(self._closing)
            closing.push_async_callback(self._leave)
            try:
                await self._start()
                await self._serve()
            except Exception as error:
                await record_end(self.notices.notices, self.server_id, error)
                raise

    async def _start(self) -> None:
        """Start the engine and join the fleet."""
        rollout = self.config.rollout
        self.endpoint.readiness = self.readiness
        self.endpoint.listen(rollout.host, rollout.metrics_port)
        await self.phases.enter(self.server_id, "checking the rewards", is_first=True)
        await self.scorer.check()
        self.scorer.begin()
        if self.agents.toolbox.tools or self.agents.mcp_servers:
            await self.phases.enter(self.server_id, "preparing the tools")
        await self.agents.open()
        await self.phases.enter(self.server_id, f"starting the {self.engine.name} engine and loading the model")
        await start_engine(self.engine, rollout.start_timeout_s)
        await self.phases.enter(self.server_id, "joining the fleet and waiting for the current weights")
        self.metrics.version.labels("rollout").set(0)
        await self.membership.join(await self._listen())
        await self.heartbeats.count_start(self.server_id)

    async def _listen(self) -> str:
        """Start the internal listener and tell where it is. Returns the address for other processes."""
        rollout = self.config.rollout
        try:
            port = self.listener.add_insecure_port(f"{rollout.host}:{rollout.port}")
        except RuntimeError as error:
            raise Unavailable(
                f"port {rollout.port} on {rollout.host} is in use; set rollout.port to a free one or 0"
            ) from error
        await self.listener.start()
        endpoint = {"host": rollout.host, "port": port, "metrics_port": self.endpoint.port}
        if rollout.http_port is not None:
            endpoint["http_port"] = await self._listen_http(rollout.http_port)
        write_endpoint(self.config.folder, self.server_id, **endpoint)
        return f"{rollout.advertise_host or rollout.host}:{port}"

    async def _listen_http(self, port: int) -> int:
        """Open the HTTP port for clients until the server ends. Returns the port."""
        from penstock_rollout.serving.http_listener import http_listener
        from penstock_rollout.serving.http_service import HttpService
        from penstock_rollout.serving.model_server_metrics import ModelServerMetrics

        config = self.config
        if self.engine.name != "vllm":  # vLLM has registered its own
            metrics = ModelServerMetrics(config.run, self.engine.stats, lambda: self.engine.policy_version >= 0)
            REGISTRY.register(metrics)
        service = HttpService(
            self.generation, http_keys(config), REGISTRY, self.readiness, config.gateway.max_body_bytes
        )
        return await self._closing.enter_async_context(http_listener(service.app(), config.rollout.host, port))

    async def _serve(self) -> None:
        """Run the loops until `stopping` is set. A loop that fails ends the server."""
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(loop, name=name)
                for name, loop in (
                    ("lease", self.producer.lease_loop()),
                    ("heartbeat", self.producer.heartbeat_loop()),
                    ("reconcile", self.producer.reconcile_loop()),
                    ("save", self.saver.save_loop()),
                    ("report", self._report_loop()),
                    ("health", self._health_loop()),
                    ("notices", self.notices.write_loop()),
                )
            ]
            await self.stopping.wait()
            await asyncio.gather(*(end_task(task) for task in loops))

    def _generating_s(self) -> float:
        """Seconds in which the engine had something to generate. It is called from another thread."""
        return self.engine.stats().generating_s if self.engine.policy_version >= 0 else 0.0

    def readiness(self) -> Readiness:
        """What `/readyz` says. It is called from another thread."""
        if self.stopping.is_set():
            return Readiness("draining", "gives unfinished prompts back and leaves the fleet")
        return self.membership.readiness() or Readiness("loading", self.phases.newest)

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


def http_keys(config: RunConfig) -> list[KeyFile]:
    """The keys of the HTTP port. If the gateway has a file of hashes, the server needs no other and holds no secret."""
    grace_s = config.gateway.keys_grace_s
    if config.gateway.keys_file is not None:
        return [KeyFile.of_hashes(config.gateway.keys_file, grace_s)]
    path = config.gateway.api_key_file or config.folder / OWN_KEY_FILE
    return [KeyFile.of_secret(path, grace_s, "gateway.api_key_file", SINGLE_KEY_NAME)]


async def record_end(notices: Notices, server_id: str, error: Exception) -> None:
    """Tell the run's users why a server ends, so that they need not find its log first."""
    cause = first_error(error)
    shown = "".join(traceback.format_exception(cause)[-SHOWN_FRAMES:])
    text = f"{server_id} ended: {described(cause)}"
    try:
        await notices.record(Event("server_failed", f"{server_id} {type(cause).__name__}", text, shown))
    except PenstockError as refusal:
        logger.warning("could not tell the run's users why this server ends: %s", refusal)


async def serve(config: RunConfig, server_id: str) -> None:
    """Run a server until SIGTERM or SIGINT."""
    check_address(config)
    check_serves_model(resolve_engine_name(config.rollout.engine), config.model.path)
    ClusterKey.of(config).make_if_missing()
    if is_loopback(config.rollout.host):
        keep_collectives_on_loopback()
    server = RolloutServer(config, server_id)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stopping.set)
    await server.run()
