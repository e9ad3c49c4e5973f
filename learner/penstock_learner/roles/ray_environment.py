"""The environment variables that Ray reads when it is imported. This module does not import ray."""

from __future__ import annotations

import os
import secrets

from penstock.config.run import RunConfig


def prepare_environment(config: RunConfig) -> None:
    """Turn off telemetry, set the threads per rank, and turn on token authentication. Call before ray is imported.

    Only a private Ray gets a token. A cluster that is joined has its own settings for authentication."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["OMP_NUM_THREADS"] = str(config.learner.threads_per_rank)
    if config.learner.profile.ray_timeline:
        os.environ["RAY_PROFILING"] = "1"
    if not config.learner.ray_address:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
