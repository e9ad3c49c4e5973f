"""The Ray cluster that a learner runs on: starting or joining it, placing the roles, and ending when it dies.

Each resource group of `penstock/config/gpu_bundles.py` gets a placement group. Rank i of every role of the group sits
in bundle i. When Ray dies, the learner ends soon, with one line that says so. Ray itself would continue for a minute
without its gcs, and then abort this process with a stack trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import psutil
import ray
from ray._private.node import Node

from penstock.cancellation import end_task
from penstock.config.gpu_bundles import active_resource_groups, bundles, num_gpus
from penstock.config.learner import LearnerConfig, RoleConfig
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, RayDied, Unavailable, one_line
from penstock.machine import accepts_connections, idle_gpus
from penstock_learner.roles.profiling import profiles_folder
from penstock_learner.roles.ray_address import FOUND_BY_RAY, ask_cluster
from penstock_learner.roles.role_group import Reservation, RoleActors, RoleGroup, gather_all, namespace_of

logger = logging.getLogger(__name__)


def num_cpus(learner: LearnerConfig, roles: Mapping[str, RoleConfig]) -> int:
    """Logical CPUs that a private Ray must offer so that all roles fit. Ray starts as many processes at once."""
    groups = active_resource_groups(learner.placement, roles)
    return int(sum(bundle.get("CPU", 0) for group in groups for bundle in bundles(group)) + 0.999)


def check_gpus(learner: LearnerConfig, roles: Mapping[str, RoleConfig], num_here: float) -> None:
    """Raise ConfigError if this machine has too few GPUs for the roles. A private Ray cannot get more nodes."""
    num_needed = num_gpus(learner.placement, roles)
    if num_needed > num_here:
        idle = "" if num_here else idle_gpus()
        found = idle or f"{num_here:g}; lower it or num_ranks, or set learner.ray_address to a cluster"
        raise ConfigError(f"learner.*.gpus_per_rank asks for {num_needed} GPUs, but this machine has {found}")


async def place_roles(config: RunConfig, roles: Mapping[str, RoleConfig], timeout_s: float) -> dict[str, RoleGroup]:
    """Reserve the resources of all roles, which can then be started. Raises DeadlineExceeded if they do not fit."""
    if not config.learner.ray_address and num_gpus(config.learner.placement, roles):
        check_gpus(config.learner, roles, ray.cluster_resources().get("GPU", 0))
    reserved = [
        Reservation(config, group, timeout_s) for group in active_resource_groups(config.learner.placement, roles)
    ]
    if config.learner.ray_address:
        for each in reserved:  # while nodes join one by one, a later group must not take what an earlier one waits for
            await each.take()
    else:
        await gather_all(*(each.take() for each in reserved))
    return {
        name: RoleGroup(RoleActors(config, name, role, each), config.learner.rank_timeout_s)
        for each in reserved
        for name, role in each.roles.items()
    }


NEEDED = ("gcs_server", "raylet")
"""The processes of a private Ray without which nothing works."""
POLL_S = 0.5
UNREACHABLE_S = 40.0
"""How long the gcs of a joined cluster may be unreachable, for example while its pod restarts. Ray waits for 60 s."""
CONNECT_S = 5.0
END_S = 10.0
"""How long the learner's own work may take to end after Ray has died."""


async def run_while_ray_lives(work: Coroutine[Any, Any, None]) -> None:
    """Do the work. Raises RayDied, and cancels the work, when Ray dies. Call it when Ray is up."""
    own = own_processes()
    await run_watched(work, watch_processes(own) if own else watch_address(ray.get_runtime_context().gcs_address))


async def run_watched(work: Coroutine[Any, Any, None], watch: Coroutine[Any, Any, NoReturn]) -> None:
    """Do the work until it ends, or until the watch raises."""
    working, watching = asyncio.create_task(work), asyncio.create_task(watch)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception():
            # The work may have failed because Ray died a moment ago. Then that explains its error.
            await asyncio.wait({watching}, timeout=3 * POLL_S)
        await (watching if watching.done() else working)
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await end_task(working)
        await end_task(watching)


def own_processes() -> dict[str, psutil.Process]:
    """The needed processes of the private Ray that this process has started. Empty on a cluster that it joined."""
    found = {}
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, IndexError):
            name = Path(process.cmdline()[0]).name
            if name in NEEDED:
                found[name] = process
    return found


async def watch_processes(processes: Mapping[str, psutil.Process]) -> NoReturn:
    """Raise RayDied when one of the processes has ended."""
    while True:
        for name, process in processes.items():
            if _has_ended(process):
                raise RayDied(
                    f"Ray's {name} has ended, and the ranks cannot work without it; check that the machine has free "
                    "memory, then start the learner again; it continues from its last checkpoint, and no group is lost"
                )
        await asyncio.sleep(POLL_S)


async def watch_address(address: str, unreachable_s: float = UNREACHABLE_S) -> NoReturn:
    """Raise RayDied when the gcs of a joined cluster has been unreachable for a while."""
    host, _, port = address.rpartition(":")
    reached_at = time.monotonic()
    while True:
        if await asyncio.to_thread(accepts_connections, host.strip("[]"), int(port), CONNECT_S):
            reached_at = time.monotonic()
        elif time.monotonic() - reached_at >= unreachable_s:
            raise RayDied(
                f"Ray's gcs at {address} has not been reachable for {unreachable_s:.0f} s; check the head of the Ray "
                "cluster (learner.ray_address), then start the learner again; it continues from its last checkpoint, "
                "and no group is lost"
            )
        await asyncio.sleep(POLL_S)


def kill_own_processes() -> None:
    for process in own_processes().values():
        for each in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def _has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


OBJECT_STORE_BYTES = 256 * 2**20
FOLDER_PREFIX = "penstock-ray-"
START_ATTEMPTS = 3
UNUSED = ("start_monitor", "start_api_server", "start_log_monitor")
"""Methods of Ray's node that start the autoscaler, the dashboard's server and the reader of the ranks' logs. A private
Ray needs none of them, but has no option to skip them, and its start would wait for the server."""


@contextmanager
def ray_cluster(config: RunConfig, roles: Mapping[str, RoleConfig]) -> Iterator[None]:
    """Join `learner.ray_address`, or start a private Ray on loopback, without a dashboard. Shuts Ray down at the end.
    Call `prepare_environment` (`__main__.py`) before ray is imported."""
    # Ray's sockets need a short path (107 bytes), so the folder is not inside the run's folder. Ray opens the folder
    # that it is given to all users, so it gets one inside a folder that only this user can enter.
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        _start_patiently(config, roles, Path(folder))
        is_alive = True
        try:
            yield
        except RayDied:
            is_alive = False
            raise
        finally:
            if not is_alive:
                kill_own_processes()  # an orderly shutdown would wait for the part that died
            else:
                if config.learner.profile.ray_timeline:
                    write_ray_timeline(profiles_folder(config) / "ray-timeline.json")
                ray.shutdown()


def remove_abandoned_folders() -> None:
    """Remove the Ray folders of learners that were killed. A folder's name contains the process id. Blocks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _start_patiently(config: RunConfig, roles: Mapping[str, RoleConfig], folder: Path) -> None:
    """Start or join Ray. A private one gets three tries: its own limit of 30 s is short for a busy machine."""
    if config.learner.ray_address not in ("", FOUND_BY_RAY):
        ask_cluster(config.learner.ray_address, UNREACHABLE_S)
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            _start(config, roles, str(folder / f"r{attempt}"))
            return
        except Exception as error:  # for a start that takes too long Ray raises no narrower class
            if address := config.learner.ray_address:
                head = "HOST:PORT" if address == FOUND_BY_RAY else address
                raise Unavailable(
                    f"the Ray cluster at learner.ray_address {address} cannot be joined: {one_line(error)}; the "
                    f"learner needs a node of it on its own machine: run `ray start --address={head}` there"
                ) from error
            if attempt == START_ATTEMPTS or "timed out" not in str(error):
                raise Unavailable(f"Ray did not start: {error}; check that the machine has free memory") from error
            logger.warning("Ray took too long to start; it is started again (%d of %d)", attempt + 1, START_ATTEMPTS)
            kill_own_processes()
            ray.shutdown()


def _start(config: RunConfig, roles: Mapping[str, RoleConfig], folder: str) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if config.learner.ray_address:
        ray.init(address=config.learner.ray_address, namespace=namespace_of(config), **quiet)
        return
    for method in UNUSED:
        setattr(Node, method, lambda *_, **__: None)
    ray.init(
        **quiet,
        num_cpus=num_cpus(config.learner, roles),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
    )


def write_ray_timeline(path: Path) -> None:
    """Write Ray's timeline, which has all calls that the cluster has made so far."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ray.timeline(str(path))
        logger.info("wrote %s", path)
    except Exception as error:  # Ray raises many types, and a timeline is not worth failing a run
        logger.error("Ray's timeline %s was not written: %r", path, error)
