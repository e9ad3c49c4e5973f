"""The rollout server process: one engine, and the loops that lease prompts, append groups and follow versions.

| loop      | waits for                                 | unblocked by                 | file                    |
|-----------|-------------------------------------------|------------------------------|-------------------------|
| lease     | a free place, a serving state, a prompt   | a finished group, a version, | `groups/producer.py`    |
|           | that the queue admits                     | a signal of the queue        |                         |
| work (×N) | the engine, the reward, room in the queue | tokens, the learner's takes  | `groups/producer.py`    |
| heartbeat | a third of the lease's lifetime           | the clock                    | `groups/producer.py`    |
| reconcile | RECONCILE_S                               | the clock                    | `groups/producer.py`    |
| save      | tokens that can be saved                  | the engine                   | `agents/saved_samples.py` |
| report    | the interval of reports to the fleet      | the clock                    | `fleet/membership.py`   |
| health    | HEALTH_S                                  | the clock                    | here                    |
| notices   | a failed reward or prompt                 | the scorer, the producer     | `store/notices.py`      |

All run in one TaskGroup: a loop that fails ends the server. Pushed versions arrive at `fleet/membership.py`, and
requests of clients at `serving/generate_service.py`. Both are gRPC services on the internal listener. The gateway
answers OpenAI's and Anthropic's protocols for the whole fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import traceback
from dataclasses import dataclass, field
from functools import partial

import grpc
import redis.asyncio as redis
from prometheus_client import REGISTRY

from penstock.cancellation import end_task
from penstock.config.run import RunConfig
from penstock.errors import PenstockError, Unavailable, described, first_error
from penstock.internal_calls import ClusterKey, check_certificates, open_internal_port
from penstock.machine import is_loopback, keep_collectives_on_loopback, warn_of_plain_links
from penstock.metrics import write_endpoint
from penstock.process_endpoint import ProcessEndpoint, Readiness
from penstock.replay.queue import RedisReplayQueue
from penstock.start_checks import check_model
from penstock.store.fleet import Fleet, PolicyRegistry
from penstock.store.heartbeats import Heartbeats, Leaving, Phases
from penstock.store.notices import Event, NoticeBoard, Notices
from penstock.store.redis_client import check_primary, connect
from penstock.tracing import Tracing, open_tracing
from penstock.v1 import generate_pb2_grpc, weights_pb2_grpc
from penstock_rollout.agents.loops import Agents
from penstock_rollout.agents.saved_samples import TokenSaver
from penstock_rollout.agents.tool_calls import tokenization_of
from penstock_rollout.engines.engine import Engine
from penstock_rollout.engines.factory import check_serves_model, create_engine, resolve_engine_name, start_engine
from penstock_rollout.fleet.membership import FleetMembership, WeightMember, make_listener
from penstock_rollout.groups.producer import GroupMaker, Producer
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.serving.generate_service import GenerateService
from penstock_rollout.serving.tool_calling import ToolCalling
from penstock_rollout.start_check import check_address
from penstock_rollout.tokenization import PromptLength

logger = logging.getLogger(__name__)
HEALTH_S = 2.0
LAST_PUSH_S = 20.0
"""How long a server that is leaving waits for a push in progress."""
SHOWN_FRAMES = 6
"""Lines of the traceback in the notice of a server that ends: the newest frames, and the error."""
CLOSE_S = 1.0
"""How long the listener waits for requests in progress when the server ends."""


@dataclass
class RolloutServer:
    """The parts of one server, and the order in which they start and stop. `assemble` makes one."""

    config: RunConfig
    server_id: str
    client: redis.Redis
    engine: Engine
    metrics: RolloutMetrics
    tracing: Tracing
    phases: Phases
    notices: NoticeBoard
    scorer: Scorer
    agents: Agents
    weight_member: WeightMember
    membership: FleetMembership
    saver: TokenSaver
    producer: Producer
    listener: grpc.aio.Server
    endpoint: ProcessEndpoint
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Serve until `stopping` is set. Then drain, leave the fleet and stop the engine."""
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(self.endpoint.close)
            closing.push_async_callback(asyncio.to_thread, self.tracing.close)
            closing.push_async_callback(self.client.aclose)
            with contextlib.suppress(Unavailable):  # Redis may start later
                await check_primary(self.client)
            leaving = Leaving(self.client, self.config.run, self.server_id)
            await closing.enter_async_context(leaving.holding(self.stopping))
            closing.push_async_callback(self.scorer.close)
            closing.push_async_callback(self.agents.close)
            closing.push_async_callback(self.engine.stop)
            closing.push_async_callback(self.listener.stop, grace=CLOSE_S)
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
        self.metrics.info.labels(self.server_id, self.engine.name).set(1)
        stats = self.engine.stats  # called from another thread
        self.metrics.generating.seconds = lambda: stats().generating_s if self.engine.policy_version >= 0 else 0.0
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
        await check_primary(self.client)  # it may have started since
        self.metrics.version.labels("rollout").set(0)
        await self.membership.join(await self._listen())
        await Heartbeats(self.client, self.config.run).count_start(self.server_id)

    async def _listen(self) -> str:
        """Start the internal listener and write where it is. Returns the address for other processes."""
        rollout = self.config.rollout
        try:
            port = open_internal_port(self.listener, f"{rollout.host}:{rollout.port}", self.config.tls)
        except RuntimeError as error:
            raise Unavailable(
                f"port {rollout.port} on {rollout.host} is in use; set rollout.port to a free one or 0"
            ) from error
        await self.listener.start()
        write_endpoint(
            self.config.folder, self.server_id, host=rollout.host, port=port, metrics_port=self.endpoint.port
        )
        return f"{rollout.advertise_host or rollout.host}:{port}"

    async def _serve(self) -> None:
        """Run the loops until `stopping` is set. A loop that fails ends the server."""
        producer, scorer = self.producer, self.scorer
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(loop, name=name)
                for name, loop in (
                    ("lease", producer.lease_loop()),
                    ("heartbeat", producer.heartbeat_loop()),
                    ("reconcile", producer.reconcile_loop()),
                    ("save", self.saver.save_loop()),
                    ("report", self.membership.report_loop(lambda: producer.num_running, lambda: scorer.num_scoring)),
                    ("health", self._health_loop()),
                    ("notices", self.notices.write_loop()),
                )
            ]
            await self.stopping.wait()
            await asyncio.gather(*(end_task(task) for task in loops))

    async def _health_loop(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            await self.engine.check_health()

    def readiness(self) -> Readiness:
        """What `/readyz` says. It is called from another thread."""
        if self.stopping.is_set():
            return Readiness("draining", "gives unfinished prompts back and leaves the fleet")
        return self.membership.readiness() or Readiness("loading", self.phases.newest)

    async def _leave(self) -> None:
        """Give back unfinished prompts and leave the fleet, so that no further push counts on this server. Then wait
        for a push in progress: if one member disappears, all members have to start it again."""
        try:
            await self.producer.drain()
            await self.membership.leave()
            await self.weight_member.wait_for_push(LAST_PUSH_S)
        except Exception as error:
            logger.warning("could not leave the fleet: %s", error)


def assemble(config: RunConfig, server_id: str) -> RolloutServer:
    """Make the parts of a server and connect them. Nothing listens or is loaded before `RolloutServer.run`."""
    run, rollout, max_model_len = config.run, config.rollout, config.rollout.engine.max_model_len
    metrics = RolloutMetrics(REGISTRY)
    engine = create_engine(
        rollout.engine, config.model.path, config.model.dtype, config.seed, report_experts=config.learner.router.replay,
        profiles=config.folder / "profiles" / server_id,
    )  # fmt: skip
    client = connect(config.redis)
    phases, fleet = Phases(client, run), Fleet(client, run)
    queue = RedisReplayQueue(client, run, config.replay)
    notices = NoticeBoard(Notices(client, run))
    tracing = open_tracing(config.tracing, "rollout", run)
    scorer = Scorer(rollout.reward, metrics, notices.post)
    prompt_length = PromptLength(rollout.prompt, max_model_len, metrics)
    tokenization = tokenization_of(config, prompt_length.fit)
    agents = Agents.load(rollout.agents, max_model_len, tokenization)
    weight_member = WeightMember(run, engine, metrics, fleet.term)
    membership = FleetMembership(
        config, server_id, engine, fleet, PolicyRegistry(client, run), weight_member, metrics,
        partial(phases.enter, server_id, "serving"),
    )  # fmt: skip
    saver = TokenSaver(queue, engine, server_id, metrics, rollout.save_every_tokens, config.replay.max_staleness)
    maker = GroupMaker(
        run, server_id, engine, tokenization, scorer, metrics, agents,
        greedy_baseline=config.learner.algorithm.advantage.has_baseline, tracing=tracing, saver=saver,
    )  # fmt: skip
    producer = Producer(
        queue, server_id, maker, rollout, config.replay, metrics, may_lease=membership.may_lease,
        engine_stats=engine.stats, tracing=tracing, post=notices.post, reward_model=config.learner.reward_model,
        validation_samples=config.learner.samples.validation_samples, saver=saver,
    )  # fmt: skip
    tool_calling = ToolCalling.of(rollout, engine.name, tokenization)
    listener = make_listener(ClusterKey.of(config))
    weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(weight_member, listener)
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(
        GenerateService(run, server_id, engine, tokenization, max_model_len, tool_calling), listener
    )
    return RolloutServer(
        config, server_id, client, engine, metrics, tracing, phases, notices, scorer, agents, weight_member, membership,
        saver, producer, listener, ProcessEndpoint(REGISTRY),
    )  # fmt: skip


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
    check_model(config)
    check_serves_model(resolve_engine_name(config.rollout.engine), config.model.path)
    ClusterKey.of(config).make_if_missing()
    check_certificates(config.tls)
    if is_loopback(config.rollout.host):
        keep_collectives_on_loopback()
    if not config.tls.files:
        warn_of_plain_links("rollout.host", config.rollout.host, "calls with the cluster key")
    server = assemble(config, server_id)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stopping.set)
    await server.run()
