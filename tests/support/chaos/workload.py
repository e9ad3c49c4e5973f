"""The work of a chaos run: numbered prompts, groups whose content depends only on the number, and settings.

The client identifies a prompt by its number, the queue by its prompt id. The learner counts by number, so it notices if
an id comes to stand for another prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from penstock.codec import encode_prompt
from penstock.config.service import ReplayConfig
from penstock.replay.queue_types import Lease
from penstock.trajectory import Group, Prompt
from support.groups import make_group

RUN = "chaos"
FENCED, UNAVAILABLE, TOO_LATE = 3, 4, 5
"""Exit codes of a learner that ended by itself and has to be started again."""


@dataclass(frozen=True)
class Settings:
    """Settings that every process of a run reads from a file."""

    redis_url: str
    checkpoints: str
    replay: dict[str, object]
    checkpoint_every: int = 2
    step_s: tuple[float, float] = (0.01, 0.04)
    group_s: tuple[float, float] = (0.005, 0.06)
    concurrent_groups: int = 12
    batch_timeout_s: float = 60.0
    starved_s: float = 5.0
    """Seconds without a batch until the learner writes a checkpoint. The controller takes a share of the deadline."""
    redis_timeout_s: float = 5.0
    redis_retry_s: float = 20.0
    rewind_to: str = ""
    """Checkpoint that the learner rewinds to; empty: none."""

    @property
    def replay_config(self) -> ReplayConfig:
        return ReplayConfig.model_validate(self.replay)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Settings:
        return cls(**json.loads(path.read_text()))


def make_payload(number: int) -> bytes:
    return encode_prompt(Prompt(token_ids=(number,), num_samples=2))


def make_numbered_group(number: int, lease: Lease, server_id: str) -> Group:
    return replace(
        make_group(number, num_samples=2),
        prompt_id=lease.prompt_id,
        attempt=lease.attempt,
        server_id=server_id,
        prompt_token_ids=np.array([number], dtype=np.int32),
    )


def number_of(group: Group) -> int:
    return int(group.prompt_token_ids[0])


def digest_of(group: Group) -> int:
    """A 64-bit hash of the trained data of a group. It leaves out id, attempt and server."""
    content = hashlib.sha256(group.prompt_token_ids.tobytes())
    for trajectory in group.trajectories:
        content.update(
            trajectory.token_ids.tobytes() + trajectory.log_probs.tobytes() + str(trajectory.reward).encode()
        )
    return int.from_bytes(content.digest()[:8], "little")


async def while_driven() -> None:
    """Return when the driver is gone, however it ended. No process outlives a chaos run."""
    driver = os.getppid()
    while os.getppid() == driver:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
