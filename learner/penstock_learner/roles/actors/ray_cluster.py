"""The Ray cluster that a learner runs on: an existing one that it joins, or a private one on this machine."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ray

from penstock.config.learner import RoleConfig
from penstock.config.run import RunConfig
from penstock.errors import RayDied, Unavailable
from penstock_learner.roles.actors.placement import num_cpus
from penstock_learner.roles.actors.ray_watch import kill_own_processes
from penstock_learner.roles.actors.role_actors import namespace_of
from penstock_learner.roles.profiling import profiles_folder, write_ray_timeline

OBJECT_STORE_BYTES = 256 * 2**20
FOLDER_PREFIX = "penstock-ray-"
START_ATTEMPTS = 3
logger = logging.getLogger(__name__)


@contextmanager
def ray_cluster(config: RunConfig, roles: Mapping[str, RoleConfig]) -> Iterator[None]:
    """Join `learner.ray_address`, or start a private Ray on loopback, without a dashboard. Shuts Ray down at the end.

    Call `ray_environment.prepare_environment` before ray is imported."""
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
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start_patiently(config: RunConfig, roles: Mapping[str, RoleConfig], folder: Path) -> None:
    """Start or join Ray. A private one gets three tries: its own limit of 30 s is short for a busy machine, and cannot
    be set."""
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            _start(config, roles, str(folder / f"r{attempt}"))
            return
        except Exception as error:  # for a start that takes too long Ray raises no narrower class
            if config.learner.ray_address or attempt == START_ATTEMPTS or "timed out" not in str(error):
                raise Unavailable(f"Ray did not start: {error}; check learner.ray_address and free memory") from error
            logger.warning("Ray took too long to start; it is started again (%d of %d)", attempt + 1, START_ATTEMPTS)
            kill_own_processes()
            ray.shutdown()


def _start(config: RunConfig, roles: Mapping[str, RoleConfig], folder: str) -> None:
    if config.learner.ray_address:
        ray.init(
            address=config.learner.ray_address,
            namespace=namespace_of(config),
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
        return
    ray.init(
        num_cpus=num_cpus(config.learner, roles),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
    )
