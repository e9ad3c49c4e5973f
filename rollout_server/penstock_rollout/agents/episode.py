"""What an agent loop returns: a trajectory before its reward."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.trajectory import FinishReason, Sampling, VersionSegment
from penstock_rollout.engines.engine import Engine


@dataclass(frozen=True)
class Episode:
    """Arrays as in penstock.trajectory.Trajectory."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    log_probs: NDArray[np.float32]
    segments: tuple[VersionSegment, ...]
    finish_reason: FinishReason


AgentLoop = Callable[[Engine, str, tuple[int, ...], Sampling], Coroutine[Any, Any, Episode]]
"""(engine, request id, prompt token ids, sampling with this sample's seed) to an episode."""
