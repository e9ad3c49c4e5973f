"""The engine protocol: the interface between a rollout server and the library that generates tokens.

Every engine guarantees the following (tests/integration/engines/test_engine_conformance.py checks each engine):
- The engine stamps every token with the policy version whose weights produced it.
- Log-probs refer to the distribution that was sampled from, after temperature and top-p.
- New weights are staged while the old ones serve, and one commit switches to them. No token comes from a mixture.
- A stage that fails or is aborted changes neither the serving weights nor the version.
- A request that starts under one version never reuses KV that another version computed, or an earlier load of the same
  version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from penstock.trajectory import ExpertIds, FinishReason, Sampling, VersionSegment
from penstock.v1 import weights_pb2


@dataclass(frozen=True)
class OutputConstraint:
    """Which texts a response may be. Tokens that lead to no such text are never sampled, and the log-probs are those of
    the distribution without them."""

    kind: Literal["json_schema", "json_object", "structural_tag"]
    text: str = ""
    """The JSON schema, or a structural tag in xgrammar's form, as JSON text."""


@dataclass(frozen=True)
class GenerateRequest:
    request_id: str
    """Unique among the running requests."""
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    """`seed` is the seed of this sample."""
    stream: bool = False
    """If False, all tokens come in one chunk at the end, which is cheaper."""
    min_chunk_tokens: int = 1
    """With `stream`: least number of tokens in a chunk, but for the first and the last. Larger chunks are cheaper."""
    constraint: OutputConstraint | None = None
    """An engine that cannot constrain its output, or does not understand the constraint, raises InvalidInput."""


@dataclass(frozen=True)
class TokenChunk:
    """New tokens of a response. Segment indices count from the start of the response."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    segments: tuple[VersionSegment, ...]
    finish_reason: FinishReason | None = None
    """Set on the last chunk only."""
    routed_experts: ExpertIds | None = None
    """[tokens, layers, top_k] the experts that were chosen for all tokens of prompt and response but the last. Set on
    the last chunk only, if the engine was created to report them."""


def clip_segments(segments: Iterable[VersionSegment], start: int, end: int) -> tuple[VersionSegment, ...]:
    """Return the parts of the segments that lie in [start, end)."""
    clipped = (VersionSegment(max(s.start, start), min(s.end, end), s.policy_version) for s in segments)
    return tuple(segment for segment in clipped if segment.start < segment.end)


def segments_of(starts: Sequence[tuple[int, int]], start: int, end: int) -> tuple[VersionSegment, ...]:
    """Return the part of [start, end) that each version produced. `starts` has a version and its first token."""
    lasts = [first for _, first in starts[1:]] + [end]
    whole = (VersionSegment(first, last, version) for (version, first), last in zip(starts, lasts, strict=False))
    return clip_segments(whole, start, end)


@dataclass(frozen=True)
class EngineStats:
    running_requests: int
    waiting_requests: int
    kv_cache_usage: float
    """0 to 1."""
    generating_s: float = field(default=0.0, compare=False)
    """Seconds since the start in which the engine had at least one request."""


@dataclass(frozen=True)
class CommitReport:
    """How long a commit took, and how many requests it interrupted."""

    receive_s: float
    load_s: float
    paused_s: float
    running_requests: int
    """Requests that were running while the version flipped."""


class Engine(Protocol):
    """One model on one or more devices. Not thread-safe: call it from the event loop that started it."""

    name: str

    @property
    def policy_version(self) -> int:
        """The version of the serving weights."""
        ...

    @property
    def weights_digest(self) -> str:
        """Digest of the buckets that were loaded as `policy_version`. Empty if the model folder was loaded."""
        ...

    @property
    def retained_version(self) -> int | None:
        """The version whose buckets were kept as the base for a delta, if any."""
        ...

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each worker's weights: `cpu`, or the GPU's UUID. Known once the engine has started."""
        ...

    async def start(self, policy_version: int) -> None:
        """Load the model folder as `policy_version`. Returns when the engine can generate."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream the tokens of one sample. Closing the iterator aborts the request and frees its resources."""
        ...

    async def interrupt(self, request_ids: Collection[str]) -> None:
        """End these requests early, without waiting for them. Each delivers the tokens that it has and were not
        delivered, with finish reason `aborted`. Ids of requests that do not run are ignored."""
        ...

    async def stage_weights(self, announcement: weights_pb2.AnnounceRequest) -> None:
        """Start to receive the announced version in the background and return at once. Replaces an earlier stage.

        The engine's first worker has the announcement's rank, and the others follow."""
        ...

    async def commit_weights(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> CommitReport:
        """Wait for the staged buckets, verify their checksums, load them and flip the version.

        Raises WeightPushFailed and changes nothing if the stage failed or a checksum differs."""
        ...

    async def abort_weights(self) -> None:
        """Drop the stage, if there is one."""
        ...

    def stats(self) -> EngineStats: ...

    async def check_health(self) -> None:
        """Raise Unavailable if the engine can no longer generate."""
        ...

    async def stop(self) -> None:
        """Free all resources and end child processes. Running requests end as aborted."""
        ...
