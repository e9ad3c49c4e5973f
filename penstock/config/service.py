"""Configuration of Redis, the replay queue, the gateway and the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.config.base import Config


class RedisConfig(Config):
    url: str = ""
    """redis://, rediss:// or unix:// address. Empty: `penstock up` starts a private server with an append-only file."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one command."""


class ReplayConfig(Config):
    groups_per_step: int = Field(default=32, ge=1)
    """Groups that one optimizer step trains."""
    max_staleness: int = Field(default=2, ge=0)
    """A prompt is leased only while its group can be trained at most this many steps after the policy it starts
    with. 0 is synchronous training."""
    stale_policy: Literal["wait", "drop", "correct"] = "correct"
    """What the learner does with a group older than the bound: train it anyway (`wait`: admission alone holds the
    bound; `correct`: and weigh it off-policy), or drop it and admit its prompt again."""
    selection: Literal["fifo", "freshest"] = "fifo"
    """Order in which the learner takes ready groups."""
    capacity_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Bytes of ready groups at which producers wait."""
    lease_ttl_s: float = Field(default=15.0, gt=0)
    """A server silent for this long loses its leases."""
    max_attempts: int = Field(default=5, ge=1)
    """Leases of one prompt before it goes to the dead letters."""
    append_timeout_s: float = Field(default=600.0, gt=0)
    """How long a producer waits for room before it gives the prompt back."""


class GatewayConfig(Config):
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `api_key_file`."""
    port: int = Field(default=0, ge=0, le=65535)
    """REST port; 0 takes a free one and writes it to the run's folder."""
    grpc_port: int = Field(default=0, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    api_key_file: Path | None = None
    """File with the key that clients send as `Authorization: Bearer …`."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    max_prompts_per_request: int = Field(default=1024, ge=1)


class DemoConfig(Config):
    """What `penstock demo` submits. A service run submits its own prompts and ignores this."""

    train_file: Path | None = None
    """Dataset whose prompts are submitted, again and again in seeded order, until the run has its steps."""
    heldout_file: Path | None = None
    """Dataset that is scored before the first and after the last step, never trained."""
    num_samples: int = Field(default=8, ge=1)
    """Samples of each training prompt: the size of a group."""
    heldout_samples: int = Field(default=2, ge=1)
    """Samples of each held-out problem."""
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=16, ge=1)
    deadline_s: float = Field(default=900.0, gt=0)
    """The demo gives up, with an error, when it takes longer than this."""
