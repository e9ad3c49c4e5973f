"""`penstock launcher --config FILE`: start runs that are created through the gateway on this machine.

Each run is its own `penstock up`, with the launcher's Redis and under the launcher's `run_dir`. A restarted launcher
starts its runs again, and they continue from their checkpoints.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from prometheus_client import REGISTRY

from penstock.cli.overrides import parse_with_overrides
from penstock.cli.parser import Parser
from penstock.config.loading import dump_config, load_config
from penstock.config.run import RunConfig
from penstock.config.service import GatewayConfig, LauncherConfig
from penstock.errors import ConfigError, PenstockError, QueueFull, Unavailable
from penstock.logs import setup_logging
from penstock.machine.private_files import keep_files_private
from penstock.metrics import write_endpoint
from penstock.process_endpoint import Readiness, process_endpoint
from penstock.start_checks import check_redis, check_run_folder, make_run_folder
from penstock.store.created_runs import CreatedRun, CreatedRuns
from penstock.store.heartbeats import Heartbeats
from penstock.store.redis_client import connect
from penstock_services.local.processes import Child, ProcessGroup

logger = logging.getLogger(__name__)
NAME = "launcher"
FOLDER = "_launcher"
"""The launcher's folder under `run_dir`. No run can have this name."""
POLL_S = 0.5
STOP_TIMEOUT_S = 180.0
"""Time that a run gets to stop; its learner writes a checkpoint."""


class Launcher:
    """Starts created runs while there is room, and records their state in the registry."""

    def __init__(self, config: RunConfig, runs: CreatedRuns, processes: ProcessGroup) -> None:
        self.config = config
        self.runs = runs
        self.processes = processes
        self.launcher_id = config.launcher.launcher_id or socket.gethostname()
        self.children: dict[str, Child] = {}
        self._terminated: set[str] = set()
        """Runs that were sent SIGTERM and have not ended yet."""
        self._has_read = False
        """Whether the newest look at the created runs succeeded."""

    def readiness(self, stopping: asyncio.Event) -> Readiness:
        """What `/readyz` says. It is called from another thread."""
        if stopping.is_set():
            return Readiness("draining", f"stops its {len(self.children)} runs, with checkpoints")
        if self._has_read:
            return Readiness("ready", f"{len(self.children)} of {self.config.launcher.max_runs} runs")
        return Readiness("stale", "it cannot read the created runs from Redis")

    async def run(self, stopping: asyncio.Event) -> None:
        """Start and stop runs until `stopping` is set. Then end all runs, with checkpoints; they stay assigned to this
        launcher."""
        try:
            while not stopping.is_set():
                try:
                    for created in await self.runs.list():
                        await self._update(created)
                    self._has_read = True
                except (Unavailable, QueueFull) as error:
                    self._has_read = False
                    logger.warning("cannot read the created runs: %s", error)
                self.processes.reap_orphans()
                await asyncio.sleep(POLL_S)
        finally:
            for child in self.children.values():
                child.process.terminate()
            await asyncio.to_thread(self.processes.stop)

    async def _update(self, created: CreatedRun) -> None:
        """Bring one run from its recorded state to the wanted one: start it, stop it, or record its end."""
        child = self.children.get(created.run)
        if created.launcher_id not in ("", self.launcher_id):
            return
        if child is not None and child.exit_code is not None:
            await self._record_end(created, child)
        elif child is not None and created.state == "STOPPING":
            if created.run not in self._terminated:
                self._terminated.add(created.run)
                child.process.terminate()
        elif child is None and created.state == "STOPPING":
            await self.runs.move(created, "STOPPED")
        elif child is None and created.state in ("CREATED", "STARTED"):
            await self._start(created)

    async def _start(self, created: CreatedRun) -> None:
        """Start a run that is new, that was resumed, or that this launcher ran before it was restarted."""
        if len(self.children) >= self.config.launcher.max_runs:
            return
        taken = await self.runs.move(created, "STARTED", launcher_id=self.launcher_id)
        if taken is None:
            return
        try:
            config_file = self._write_config(taken)
        except (ConfigError, OSError) as error:
            await self.runs.move(taken, "FAILED", detail=str(error))
            return
        command = [sys.executable, "-m", "penstock.cli.main", "up", str(config_file)]
        self.children[created.run] = self.processes.start(created.run, command, stop_timeout_s=STOP_TIMEOUT_S)
        logger.info("run %s started; log: %s", created.run, self.children[created.run].log)

    async def _record_end(self, created: CreatedRun, child: Child) -> None:
        """Record that a run has stopped, finished or failed."""
        if created.state == "STOPPING":
            recorded = await self.runs.move(created, "STOPPED")
        elif child.exit_code == 0:
            recorded = await self.runs.move(created, "FINISHED")
        else:
            recorded = await self.runs.move(created, "FAILED", detail=str(child.error()))
        if recorded is not None:
            logger.info("run %s is %s %s", recorded.run, recorded.state.lower(), recorded.detail)
            self.processes.remove(child)
            del self.children[created.run]
            self._terminated.discard(created.run)

    def _write_config(self, created: CreatedRun) -> Path:
        """Write the run's config. Only its owner can read it, because it may contain Redis' password. The run's own
        gateway listens on loopback."""
        config = created.config_at(self.config)
        config = config.model_copy(update={"gateway": GatewayConfig(), "launcher": LauncherConfig()})
        make_run_folder(config)
        path = config.folder / "created.yaml"
        path.touch(mode=0o600)
        path.write_text(dump_config(config))
        return path


async def serve(config: RunConfig) -> None:
    """Run a launcher until SIGTERM or SIGINT."""
    folder = config.run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    client = connect(config.redis)
    try:
        with (folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"a launcher is already running in {config.run_dir}; stop it, or set another run_dir"
                ) from error
            launcher = Launcher(config, CreatedRuns(client), ProcessGroup(folder))
            host, port = config.launcher.metrics_host, config.launcher.metrics_port
            with process_endpoint(REGISTRY, host, port) as endpoint:
                endpoint.readiness = partial(launcher.readiness, stopping)
                write_endpoint(folder, NAME, host=host, metrics_port=endpoint.port)
                async with Heartbeats(client, config.run).beating(NAME):
                    await launcher.run(stopping)
    finally:
        await client.aclose()


def check(config: RunConfig) -> None:
    if not config.launcher.max_runs:
        raise ConfigError(
            "launcher.max_runs is 0; set it to the number of created runs that this machine may run at once"
        )
    check_redis(config.redis)
    check_run_folder(config)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="penstock launcher", description="Start runs that are created through the gateway on this machine."
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the gateway")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    args, overrides = parse_with_overrides(parser, argv)
    config = load_config(args.config, overrides)
    check(config)
    if args.check:
        print(f"{args.config}: ok")
        return 0
    setup_logging(NAME, config.run)
    keep_files_private()
    asyncio.run(serve(config))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PenstockError as error:
        sys.exit(f"penstock launcher: error: {error}")
