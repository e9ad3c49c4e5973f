"""The rollout server: engine, producer and weight member in one process, under one TaskGroup."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time

import grpc
from prometheus_client import REGISTRY

from penstock.cancellation import end_task
from penstock.config.run import RunConfig
from penstock.errors import NotFound, Unavailable, WeightPushFailed
from penstock.logs import bind
from penstock.metrics import serve_metrics, write_endpoint
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.fleet import SERVING_STATES, Fleet, ServerRecord, ServerState
from penstock.store.heartbeats import Heartbeats
from penstock.store.policies import PolicyRegistry
from penstock.store.redis_client import connect
from penstock.store.run_control import RunControl
from penstock.tracing import open_tracing
from penstock.v1 import generate_pb2_grpc, policies_pb2, weights_pb2_grpc
from penstock.weights.transports import host_id
from penstock_rollout.agents.registry import Agents
from penstock_rollout.engines.factory import create_engine, start_engine
from penstock_rollout.generate_service import GenerateService
from penstock_rollout.groups.group_maker import GroupMaker
from penstock_rollout.groups.producer import Producer
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.start_check import check_address
from penstock_rollout.text.prompt_length import PromptLength
from penstock_rollout.text.tokenization import Tokenization
from penstock_rollout.weights.available import available_transports
from penstock_rollout.weights.catch_up import load_snapshot
from penstock_rollout.weights.member import WeightMember

logger = logging.getLogger(__name__)
REPORT_S = 0.5
HEALTH_S = 2.0
POLL_S = 0.05
LAST_PUSH_S = 20.0
"""How long a server that leaves goes on receiving what it was announced."""
MAX_MANIFEST_BYTES = 64 * 2**20


class RolloutServer:
    """One member of the fleet. `state` is what the registry says of it; it leases only while READY or LOADING."""

    def __init__(self, config: RunConfig, server_id: str) -> None:
        self.config = config
        self.server_id = server_id
        self.state: ServerState = "JOINING"
        self.reported_at = 0.0
        self.refused_snapshot = ""
        self.silent_since: float | None = None
        """When it stopped serving, after it had served."""
        self.held_version: int | None = None
        self.stopping = asyncio.Event()
        self.metrics = RolloutMetrics(REGISTRY)
        self.engine = create_engine(config.rollout.engine, config.model.path, config.model.dtype, config.seed)

    async def run(self) -> None:
        """Serve until `stopping`, then drain, leave the fleet and stop the engine."""
        config = self.config
        check_address(config)
        scorer = Scorer(config.rollout.reward, self.metrics)
        tokenization = Tokenization(
            config.model.path,
            PromptLength(config.rollout.prompt, config.rollout.engine.max_model_len, self.metrics).fit,
        )
        agents = Agents.load(config.rollout.agents, config.rollout.engine.max_model_len, tokenization)
        tracing = open_tracing(config.tracing, "rollout", config.run)
        client = connect(config.redis)
        self.fleet = Fleet(client, config.run)
        self.heartbeats = Heartbeats(client, config.run)
        self.policies = PolicyRegistry(client, config.run)
        self.control = RunControl(client, config.run)
        queue = RedisReplayQueue(client, config.run, config.replay)
        maker = GroupMaker(
            config.run, self.server_id, self.engine, tokenization, scorer, self.metrics, agents,
            greedy_baseline=config.learner.algorithm.advantage.has_baseline, tracing=tracing,
        )  # fmt: skip
        self.producer = Producer(
            queue, self.server_id, maker, config.rollout, config.replay, self.metrics,
            may_lease=self._may_lease, engine_stats=self.engine.stats, tracing=tracing,
        )  # fmt: skip
        listener = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MANIFEST_BYTES)])
        try:
            await scorer.check()
            await start_engine(self.engine, config.rollout.start_timeout_s)
            self.metrics.version.labels("rollout").set(0)
            generation = GenerateService(
                config.run,
                self.server_id,
                self.engine,
                tokenization,
                config.rollout.engine.max_model_len,
                config.weights,
            )
            await self._listen(listener, generation)
            await self._serve()
        finally:
            with contextlib.suppress(Exception):
                await self._leave()
            await listener.stop(grace=1.0)
            await self.engine.stop()
            await scorer.close()
            await client.aclose()
            await asyncio.to_thread(tracing.close)

    async def _listen(self, listener: grpc.aio.Server, generation: GenerateService) -> None:
        rollout = self.config.rollout
        self.member = WeightMember(self.config.run, self.engine, self.config.weights, self.metrics, self.fleet.term)
        weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(self.member, listener)
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(generation, listener)
        try:
            port = listener.add_insecure_port(f"{rollout.host}:{rollout.port}")
        except RuntimeError as error:
            raise Unavailable(
                f"port {rollout.port} on {rollout.host} is in use; set rollout.port to a free one or 0"
            ) from error
        await listener.start()
        self.address = f"{rollout.advertise_host or rollout.host}:{port}"
        metrics_port = serve_metrics(REGISTRY, rollout.host, rollout.metrics_port)
        write_endpoint(self.config.folder, self.server_id, host=rollout.host, port=port, metrics_port=metrics_port)

    async def _serve(self) -> None:
        await self.fleet.join(self._record())
        await self.heartbeats.count_start(self.server_id)
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(loop, name=name)
                for name, loop in (
                    ("lease", self.producer.lease_loop()),
                    ("heartbeat", self.producer.heartbeat_loop()),
                    ("reconcile", self.producer.reconcile_loop()),
                    ("report", self._report_loop()),
                    ("health", self._health_loop()),
                )
            ]
            await self.stopping.wait()
            await asyncio.gather(*(end_task(task) for task in loops))

    async def _leave(self) -> None:
        """Give back what is unfinished and leave the fleet, so that no further push counts on this server; then let one
        that has begun end: the members of a transfer all start again when one is gone from it."""
        await self.producer.drain()
        await self.fleet.leave(self.server_id)
        for _ in range(int(LAST_PUSH_S / POLL_S)):
            if not (hasattr(self, "member") and self.member.is_receiving):
                break
            await asyncio.sleep(POLL_S)
        logger.info("left the fleet")

    def _may_lease(self) -> bool:
        """Serving, by a registry that was asked recently: a server that slept must look again before it leases."""
        is_fresh = time.monotonic() - self.reported_at < self.config.replay.lease_ttl_s
        return is_fresh and self.state in SERVING_STATES

    async def _report_loop(self) -> None:
        """Tell the fleet this server lives, and follow what the registry says of it."""
        while True:
            try:
                self._follow(await self._next_state(await self.fleet.report(self._record())))
                bind(policy_version=self.engine.policy_version)
                self.reported_at = time.monotonic()
            except Unavailable as error:
                logger.warning("cannot report to the fleet: %s", error)
            await asyncio.sleep(REPORT_S)

    def _follow(self, state: ServerState) -> None:
        """Take a state over, and observe how long it was until this server served again."""
        if state in SERVING_STATES and self.silent_since is not None:
            self.metrics.recovery_seconds.labels("rollout").observe(time.monotonic() - self.silent_since)
            self.silent_since = None
        elif state not in SERVING_STATES and self.state in SERVING_STATES:
            self.silent_since = time.monotonic()
        self.state = state

    async def _next_state(self, recorded: ServerState | None) -> ServerState:
        """The server's own moves: JOINING and EVICTED become STALE; STALE becomes READY at the wanted version. One that
        is READY at another than the version it is held at, or was until now, becomes STALE."""
        state = recorded or "JOINING"
        held = (await self.control.orders()).held_version
        if held is None:
            held = await self.policies.pinned_version(self.server_id)
        was_held, self.held_version = self.held_version, held
        target = held if held is not None or was_held is None else (await self._wanted(None)).policy_version
        is_elsewhere = target is not None and state in SERVING_STATES and self.engine.policy_version != target
        if state in ("JOINING", "EVICTED") or is_elsewhere:
            state = await self._move("STALE")
        if state == "STALE":
            wanted = await self._wanted(held)
            await self._load_kept(wanted, is_held=held is not None)
            if self.engine.policy_version == wanted.policy_version:
                state = await self._move("READY")
        return state

    async def _load_kept(self, wanted: policies_pb2.Policy, is_held: bool) -> None:
        """Catch up from a snapshot of the wanted version: where the config says so, and always to a held one, which the
        learner does not push."""
        weights = self.config.weights
        is_behind = self.engine.policy_version != wanted.policy_version
        may_load = is_held or weights.catch_up == "snapshot"
        if not may_load or not is_behind or wanted.snapshot_path in ("", self.refused_snapshot):
            return
        if self.member.is_receiving:
            return  # a push brings a newer version; a stage of our own would take its place
        try:
            await load_snapshot(self.engine, wanted, weights.push_timeout_s)
            self.metrics.version.labels("rollout").set(wanted.policy_version)
        except WeightPushFailed as error:
            logger.warning("cannot catch up by itself: %s", error)
            self.refused_snapshot = wanted.snapshot_path

    async def _move(self, state: ServerState) -> ServerState:
        logger.info("%s at version %d", state, self.engine.policy_version)
        await self.fleet.set_state(self.server_id, state)
        return state

    async def _wanted(self, held: int | None) -> policies_pb2.Policy:
        """The version that this server is held at, else the run's current one; 0, the model folder itself, before the
        learner has published any."""
        try:
            return await self.policies.get(held)
        except NotFound:
            return policies_pb2.Policy(policy_version=0)

    async def _health_loop(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            await self.engine.check_health()

    def _record(self) -> ServerRecord:
        return ServerRecord(
            server_id=self.server_id,
            address=self.address,
            engine=self.engine.name,
            policy_version=self.engine.policy_version,
            weights_digest=self.engine.weights_digest,
            devices=self.engine.devices,
            host_id=host_id(),
            transports=available_transports(self.engine.devices),
            running_groups=self.producer.num_running,
        )


async def serve(config: RunConfig, server_id: str) -> None:
    server = RolloutServer(config, server_id)
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, server.stopping.set)
    await server.run()
