"""The engine contract: what a rollout server needs of whatever generates tokens.

Guarantees that every engine keeps (tests/integration/engines/test_engine_conformance.py runs them all):
- every token is stamped by the engine with the policy version whose weights produced it;
- log-probs are of the distribution really sampled: after temperature and top-p;
- weights are staged beside the serving ones and flip in one commit; a request sees the old set or the new, and a token
  is never produced by a mixture;
- a failed or aborted stage leaves the serving weights and the version as they were;
- KV computed by one version is never reused for a request that starts under another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from penstock.trajectory import FinishReason, Sampling, VersionSegment
from penstock.v1 import weights_pb2


@dataclass(frozen=True)
class GenerateRequest:
    request_id: str
    """Unique among the requests that run."""
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    """`seed` is this sample's own."""
    stream: bool = False
    """False: one chunk at the end, which is cheaper."""


@dataclass(frozen=True)
class TokenChunk:
    """A run of new tokens. Segment indices are absolute within the response."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    segments: tuple[VersionSegment, ...]
    finish_reason: FinishReason | None = None
    """Set on the last chunk only."""


@dataclass(frozen=True)
class EngineStats:
    running_requests: int
    waiting_requests: int
    kv_cache_usage: float
    """0 to 1."""


@dataclass(frozen=True)
class StageRequest:
    """Where the bytes of a new version come from."""

    manifest: weights_pb2.WeightManifest
    transport: str
    """One of penstock.weights.transports."""
    rendezvous: str
    rank: int
    """Of the engine's first worker; the others follow."""
    world_size: int
    timeout_s: float


@dataclass(frozen=True)
class CommitReport:
    receive_s: float
    load_s: float
    paused_s: float
    running_requests: int
    """Requests in flight while the version flipped."""


class Engine(Protocol):
    """One model on one or more devices. Not thread-safe: call it from the event loop it was started on."""

    name: str

    @property
    def policy_version(self) -> int:
        """The version that new tokens are stamped with."""
        ...

    @property
    def weights_digest(self) -> str:
        """Of the buckets that were loaded as `policy_version`, as they were received; empty for the model folder."""
        ...

    @property
    def retained_version(self) -> int | None:
        """The version whose buckets were kept, on which a delta may be staged."""
        ...

    @property
    def devices(self) -> tuple[str, ...]:
        """Where each worker's weights lie: `cpu`, or the GPU's UUID. Known once the engine was started."""
        ...

    async def start(self, policy_version: int) -> None:
        """Load the model folder, which holds `policy_version`, and be ready to generate."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream the tokens of one sample. Closing the iterator aborts the request and frees it."""
        ...

    async def pause(self) -> None:
        """Stop decoding; running requests stay, with their KV cache."""
        ...

    async def resume(self) -> None: ...

    async def stage_weights(self, request: StageRequest) -> None:
        """Begin receiving a version in the background and return at once. Replaces an earlier stage."""
        ...

    async def commit_weights(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> CommitReport:
        """Wait for the staged buckets, verify their checksums, load them, flip the version.

        Raises WeightPushFailed, and changes nothing, when the stage failed or a checksum differs."""
        ...

    async def abort_weights(self) -> None:
        """Forget the stage. Harmless when there is none."""
        ...

    def stats(self) -> EngineStats: ...

    async def check_health(self) -> None:
        """Raise Unavailable when the engine can no longer generate."""
        ...

    async def stop(self) -> None:
        """Free everything, child processes too. Requests that run end as aborted."""
        ...
