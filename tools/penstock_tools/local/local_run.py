"""A whole run on this machine, with every process of a config file as a child of this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Self

from penstock.api.records import Server
from penstock.api_keys import OWN_KEY_FILE, read_own_key, read_secret
from penstock.client import PenstockClient
from penstock.client.address import write_restarting
from penstock.config.loading import dump_config, load_config
from penstock.config.run import RunConfig
from penstock.diagnosis.facts import PROCESS_STARTED
from penstock.errors import ConfigError, DeadlineExceeded, PenstockError
from penstock.feed.feed_process import FEED, feed_file
from penstock.internal_calls import ClusterKey
from penstock.machine import close_to_others, free_port, port_is_free, visible_gpus, wait_for_port, write_private
from penstock.store.heartbeats import Phases
from penstock.store.notices import Event, Notices
from penstock.store.redis_client import connect
from penstock_tools.local import join
from penstock_tools.local.private_redis import find_redis_server, kept_port, write_config, write_secret
from penstock_tools.local.processes import (
    ORPHANS_S,
    Child,
    HungServers,
    ProcessGroup,
    Restart,
    Restarts,
    divide_gpus,
    try_lock,
)
from penstock_tools.local.start_check import check_before_start, check_before_view

logger = logging.getLogger(__name__)
LEARNER, GATEWAY = "learner", "gateway"
STOP_CALLS = 3
"""A learner that stops may take as long as this many calls of its ranks may: the step, the copy of the shards, and
their files."""
CUT_SHORT_S = 60.0
"""How long a learner has that has nothing to save, cannot save without Redis, or whose run is not continued."""


class LocalRun:
    """`async with LocalRun(config) as run:` starts the run's processes, and returns once the gateway is up.
    `run.start_feed()` starts the feed, which the others do not need.

    Leaving the block ends every process. Starting the run again continues it."""

    def __init__(self, config: RunConfig, host: str = "", *, is_view: bool = False) -> None:
        """`host` is the address at which other machines reach this one, and join the run. Empty means that none can. A
        view starts Redis and the gateway only, and leaves the run's `config.yaml` as it is."""
        self.config = config
        self.host = host
        self.is_view = is_view
        self.folder = config.folder
        self.config_file = config.folder / ("view.yaml" if is_view else "config.yaml")
        """The resolved config, which every child reads."""
        self.processes = ProcessGroup(config.folder / "logs")
        self.on_restart: Callable[[str], None] = lambda _: None
        """Called with a line about a process that has died and will be started again."""
        self._server_ids = [f"rollout-{index}" for index in range(config.rollout.num_servers)]
        restarted = (GATEWAY, *self._server_ids, FEED)
        self._restarts = Restarts(self.processes, restarted, config.max_restarts, self._was_ready)
        # A server that loads a snapshot sends no heartbeat meanwhile, and has `push_timeout_s` for it.
        recent_s = config.replay.lease_ttl_s
        self._hung = HungServers(recent_s, recent_s + config.weights.push_timeout_s)
        self._lock: IO[str] | None = None
        self._ray_folder = ""
        self._client: PenstockClient | None = None
        self._learner: Child | None = None
        self.has_trained = True
        """Whether the learner may have something to save. If false, it is not given long to end."""
        self._environments: dict[str, dict[str, str]] = {}
        """Additional environment variables of a process, by its name."""

    async def __aenter__(self) -> Self:
        (check_before_view if self.is_view else check_before_start)(self.config)
        await self._take_lock()
        try:
            ClusterKey.of(self.config).make_if_missing()
            if self.host:
                self.config = join.opened(self.config, self.host, ClusterKey.of(self.config).file)
            self._start_redis()
            write_private(self.config_file, dump_config(self.config))  # it has Redis' password
            assert load_config(self.config_file) == self.config, "the written config differs from the resolved one"
            if self.host:
                join.write_join_file(self.config, self._ray_token_file)
            for name in (GATEWAY, feed_file(self.config)):
                (self.folder / f"{name}.json").unlink(missing_ok=True)
            gateway = self._start_process(GATEWAY, "penstock_services.gateway")
            if not self.is_view:
                # A run that is continued is not shown as stopped.
                async with contextlib.aclosing(connect(self.config.redis)) as client:
                    await Phases(client, self.config.run).enter(LEARNER, PROCESS_STARTED, is_first=True)
                self._start_workers()
            self._client = await self._wait_for_gateway(gateway, timeout_s=180)
            # A restarted gateway gets the ports it has now, so that clients and browsers find it again.
            listens = json.loads((self.folder / "gateway.json").read_text())
            ports = [f"--gateway.port={listens['rest_port']}", f"--gateway.grpc_port={listens['grpc_port']}"]
            gateway.command = [*gateway.command, *ports]
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, _: object = None, error: BaseException | None = None, *__: object) -> None:
        has_redis = all(child.exit_code is None for child in self.processes.children if child.ends_last)
        can_save = has_redis and self.has_trained and not isinstance(error, asyncio.CancelledError)
        if self._learner is not None and not can_save:
            self._learner.stop_timeout_s = CUT_SHORT_S
        if self._client is not None:
            await self._client.aclose()
        await asyncio.to_thread(self.processes.stop)
        if self._ray_folder:
            shutil.rmtree(self._ray_folder, ignore_errors=True)
        if self._lock is not None:
            write_restarting(self.folder, {})
            self._lock.close()

    def start_feed(self) -> None:
        if self.config.dataset.file is not None or self.config.dataset.validation.file is not None:
            self._start_process(FEED, "penstock.cli.commands.feed", "--watch")

    def _start_workers(self) -> None:
        self._environments = divide_gpus(self.config, visible_gpus())
        if (token_file := self._ray_token_file) is not None:
            self._environments[LEARNER] = join.ray_environment(token_file)
            self._ray_folder = tempfile.mkdtemp(prefix="penstock-head-")  # Ray's sockets need a short path (107 bytes)
            command = join.ray_head_command(self.config, self.host, self._ray_folder)
            self.processes.start("ray", command, environment=join.ray_environment(token_file), stop_timeout_s=60)
        stop_timeout_s = STOP_CALLS * self.config.learner.rank_timeout_s
        self._learner = self._start_process(LEARNER, "penstock_learner", stop_timeout_s=stop_timeout_s)
        self._learner.work_at_end = partial(_work_at_end, self.folder / "checkpoints", self._learner.started_at)
        for server_id in self._server_ids:
            self._start_process(server_id, "penstock_rollout", "--server-id", server_id, stop_timeout_s=30)

    async def check(self) -> None:
        """Restart the gateway, rollout servers and the feed if they have died. Raise ProcessDied if another process
        has, or one without restarts left. The learner and the feed may finish."""
        restarts = self._restarts.check(may_finish=(LEARNER, FEED))
        write_restarting(self.folder, self._restarts.ended)
        for restart in restarts:
            self.on_restart(
                f"{restart.text}; it is started again in {restart.delay_s:g} s (restart {restart.number} of "
                f"{self.config.max_restarts})"
            )
            await self._record(restart)

    def end_hung(self, servers: Sequence[Server] | None) -> None:
        """Kill servers without a heartbeat for too long; `check` restarts them. `servers` is None if unknown."""
        ready = {
            child.name: child
            for child in self.processes.children
            if child.name in self._server_ids and child.exit_code is None and self._was_ready(child)
        }
        stopped = [name for name, child in ready.items() if child.is_stopped]
        hung = self._hung.update(servers, ready.keys(), stopped)
        for server_id, age_s in self._hung.newly_silent.items():
            if server_id not in stopped:
                self.on_restart(
                    f"{server_id} has sent no heartbeat for {age_s:.0f} s; after {self._hung.limit_s:.0f} s it is "
                    "killed and started again"
                )
        for server_id, age_s in hung.items():
            self.processes.kill(ready[server_id], f"sent no heartbeat for {age_s:.0f} s and was killed")

    @property
    def is_up(self) -> bool:
        return self._client is not None

    @property
    def client(self) -> PenstockClient:
        assert self._client is not None, "the gateway is not up"
        return self._client

    @property
    def console(self) -> str:
        """Where the console is: on a terminal a link with the gateway's own key, in logs the name of the key's file."""
        url, own_key = self.client.address.url, self.folder / OWN_KEY_FILE
        if self.config.gateway.api_key_file or self.config.gateway.keys_file:
            return f"{url}/"
        return f"{url}/#key={read_own_key(self.folder)}" if sys.stdout.isatty() else f"{url}/ (key: {own_key})"

    @property
    def learner_finished(self) -> bool:
        return self._learner is not None and self._learner.exit_code == 0

    def _was_ready(self, child: Child) -> bool:
        return child.has_written(self.folder / f"{feed_file(self.config) if child.name == FEED else child.name}.json")

    async def _record(self, restart: Restart) -> None:
        """Record a notice, which the run's state shows until the run is resumed."""
        event = Event("process_restarted", restart.name, f"{restart.text}; `penstock up` starts it again")
        async with contextlib.aclosing(connect(self.config.redis)) as client:
            try:
                await Notices(client, self.config.run).record(event)
            except PenstockError as error:
                logger.warning("cannot record the restart of %s: %s", restart.name, error)

    @property
    def _ray_token_file(self) -> Path | None:
        """The token of the Ray whose head this run starts. None if it starts none."""
        if not join.starts_ray_head(self.config, self.host):
            return None
        return write_secret(self.folder / "ray.token")

    def _start_redis(self) -> None:
        if self.config.redis.url:
            return
        kept = kept_port(self.folder / "redis") if self.host or self.is_view else 0
        if self.is_view and not port_is_free("127.0.0.1", kept):
            kept = 0
        port = kept or free_port(self.host or "127.0.0.1")
        # Machines that have joined the run know the port in redis.conf.
        name = "view.conf" if self.is_view else "redis.conf"
        redis_config, url = write_config(self.folder / "redis", port, host=self.host, name=name)
        redis = self.processes.start("redis", [find_redis_server(), str(redis_config)], ends_last=True)
        if not wait_for_port("127.0.0.1", port, timeout_s=30, while_true=lambda: redis.exit_code is None):
            if redis.exit_code is not None:
                raise redis.error()
            raise DeadlineExceeded(f"Redis did not start in 30 s (log: {self.folder / 'logs' / 'redis.log'})")
        self.config = self.config.changed({"redis.url": url})

    def _start_process(self, name: str, module: str, *arguments: str, stop_timeout_s: float = 20) -> Child:
        command = [sys.executable, "-m", module, "--config", str(self.config_file), *arguments]
        environment = self._environments.get(name)
        return self.processes.start(name, command, environment=environment, stop_timeout_s=stop_timeout_s)

    async def _wait_for_gateway(self, gateway: Child, timeout_s: float) -> PenstockClient:
        deadline = time.monotonic() + timeout_s
        while not (self.folder / "gateway.json").exists():
            if gateway.exit_code is not None:
                raise gateway.error()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the gateway did not start in {timeout_s:.0f} s; see {self.folder / 'logs'}")
            await asyncio.sleep(0.05)
        return PenstockClient.from_run_dir(self.folder, read_secret(self.config.gateway.api_key_file))

    async def _take_lock(self) -> None:
        """Lock the run's folder. If its supervisor was killed, wait until the processes that it left have ended."""
        self.folder.mkdir(parents=True, exist_ok=True)
        close_to_others(self.folder)
        deadline = time.monotonic() + ORPHANS_S
        taken = f"run {self.config.run} is already running in {self.folder}; stop it first"
        while (lock := try_lock(self.folder, taken)) is None:
            if time.monotonic() > deadline:
                raise ConfigError(taken)
            await asyncio.sleep(0.1)
        self._lock = self.processes.held_file = lock


def _work_at_end(checkpoints: Path, since_s: float) -> str:
    """What a learner that stops does, as its folder of checkpoints shows."""
    newest = max(checkpoints.glob("term-*-step-*.partial"), default=None)
    with contextlib.suppress(FileNotFoundError):  # it has just been finished
        if newest is not None and newest.stat().st_mtime >= since_s:
            return f"writing the checkpoint of step {step_of(newest)}"
    return ""


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.rpartition("-")[2])
