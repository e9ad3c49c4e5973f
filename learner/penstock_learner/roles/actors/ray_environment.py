"""The environment variables that Ray reads when it is imported. This module does not import ray."""

from __future__ import annotations

import os
import secrets

from penstock.config.run import RunConfig
from penstock.machine.ports import is_loopback, keep_collectives_on_loopback


def prepare_environment(config: RunConfig) -> None:
    """Turn off telemetry and downloads, and set the threads per rank. Call before ray is imported.

    A private Ray gets a token, and listens on loopback only, as do the process groups of its ranks. A cluster that is
    joined has its own settings."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["HF_HUB_OFFLINE"] = "1"  # the models are local by now, and ranks make no network calls
    os.environ["OMP_NUM_THREADS"] = str(config.learner.threads_per_rank)
    if config.learner.profile.ray_timeline:
        os.environ["RAY_PROFILING"] = "1"
    if not config.learner.ray_address:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # On Linux, Ray replaces the address 127.0.0.1 with that of another interface, and then listens on all of them,
        # unless this says that the node belongs to no cluster.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if is_loopback(config.learner.publish_host or "127.0.0.1"):
            keep_collectives_on_loopback()
