"""The Ray that a learner runs on: a cluster it joins, or a private one on this machine."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import ray

from penstock.config.learner import RoleConfig
from penstock.config.run import RunConfig
from penstock.errors import Unavailable
from penstock_learner.placement import num_cpus

OBJECT_STORE_BYTES = 256 * 2**20


def start_ray(config: RunConfig, roles: Mapping[str, RoleConfig]) -> None:
    """Join `learner.ray_address`, or start a private Ray: loopback, no dashboard.

    `ray_environment.prepare_environment` was called before ray was imported."""
    learner = config.learner
    try:
        if learner.ray_address:
            ray.init(address=learner.ray_address, log_to_driver=False, logging_level=logging.WARNING)
            return
        ray.init(
            num_cpus=num_cpus(learner, roles),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=_short_folder(),
            _node_ip_address="127.0.0.1",
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Unavailable(f"Ray did not start: {error}; check learner.ray_address and free memory") from error


def _short_folder() -> str:
    """Ray's sockets need a short path (107 bytes): never inside the run's folder."""
    folder = Path(tempfile.gettempdir()) / f"penstock-ray-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return str(folder)
