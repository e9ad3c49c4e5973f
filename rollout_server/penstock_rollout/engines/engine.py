"""The engine: the interface between a rollout server and the library that generates tokens.

Every engine guarantees the following (tests/integration/engines/test_engine_conformance.py checks each engine):
- The engine stamps every token with the policy version whose weights produced it.
- Log-probs refer to the distribution that was sampled from, after temperature and top-p.
- New weights are staged while the old ones serve, and one commit switches to them. No token comes from a mixture.
- A stage that fails or is aborted changes neither the serving weights nor the version.
- A request that starts under one version never reuses KV that another version computed, or an earlier load of the same
  version.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penstock.config.rollout import EngineConfig
from penstock.errors import InvalidInput, Unavailable
from penstock.trajectory import ExpertIds, FinishReason, Sampling, VersionSegment
from penstock.v1 import weights_pb2
from penstock.weights.folder_tensors import stop_token_ids, tensor_shapes
from penstock.weights.transports import check_manifest, weights_digest


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


class Engine(ABC):
    """One model on one or more devices. Not thread-safe: call it from the event loop that started it.

    The bookkeeping of versions is the same for every engine:

    | call      | policy_version, weights_digest | retained_version                                               |
    |-----------|--------------------------------|----------------------------------------------------------------|
    | `_opened` | the given version, no digest   | None                                                           |
    | `_stages` | stay                           | None, because a stage takes the buckets of the version before  |
    | `_loaded` | those of the loaded version    | the loaded version, if its buckets are kept                    |

    If a stage is dropped or fails, version and digest stay, and no base for a delta is left."""

    name: str

    def __init__(self, config: EngineConfig, model_path: Path, dtype: str, seed: int) -> None:
        self._config = config
        self._model_path = model_path
        self._dtype = dtype
        self._seed = seed
        self.policy_version = -1
        """The version of the serving weights."""
        self.weights_digest = ""
        """Digest of the buckets that were loaded as `policy_version`. Empty if the model folder was loaded."""
        self.retained_version: int | None = None
        """The version whose buckets were kept as the base for a delta, if any."""
        self.devices: tuple[str, ...] = ()
        """The device of each worker's weights: `cpu`, or the GPU's UUID. Known once the engine has started."""
        self._staged: weights_pb2.AnnounceRequest | None = None
        """The newest announcement that was not loaded or dropped yet."""
        self._num_loads = 0
        self._stop_ids: list[int] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._request_ids: set[str] = set()
        """Requests between their submission and their end."""
        self._busy_since = self._busy_s = 0.0
        """When the first of the running requests came, and the seconds before it in which there was one."""
        self._broken = "it was not started"
        """Why the engine cannot generate, or an empty text."""

    @abstractmethod
    async def start(self, policy_version: int) -> None:
        """Load the model folder as `policy_version`. Returns when the engine can generate."""

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream the tokens of one sample. Closing the iterator aborts the request and frees its resources."""

    @abstractmethod
    async def interrupt(self, request_ids: Collection[str]) -> None:
        """End these requests early, without waiting for them. Each delivers the tokens that it has and were not
        delivered, with finish reason `aborted`. Ids of requests that do not run are ignored."""

    @abstractmethod
    async def stage_weights(self, announcement: weights_pb2.AnnounceRequest) -> None:
        """Start to receive the announced version in the background and return at once. Replaces an earlier stage. The
        engine's first worker has the announcement's rank, and the others follow."""

    @abstractmethod
    async def commit_weights(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> CommitReport:
        """Wait for the staged buckets, verify their checksums, load them and flip the version. Raises WeightPushFailed
        and changes nothing if the stage failed or a checksum differs."""

    @abstractmethod
    async def abort_weights(self) -> None:
        """Drop the stage, if there is one."""

    @abstractmethod
    def stats(self) -> EngineStats: ...

    async def check_health(self) -> None:
        """Raise Unavailable if the engine can no longer generate."""
        if self._broken:
            raise Unavailable(f"the {self.name} engine cannot generate: {self._broken}")

    @abstractmethod
    async def stop(self) -> None:
        """Free all resources and end child processes. Running requests end as aborted."""

    @contextmanager
    def _serving(self, request_id: str) -> Iterator[None]:
        """Surrounds one request. Raises InvalidInput if another one with this id runs."""
        if request_id in self._request_ids:
            raise InvalidInput("request_id", f"{request_id!r} is running already")
        if not self._request_ids:
            self._busy_since = time.monotonic()
        self._request_ids.add(request_id)
        try:
            yield
        finally:
            self._request_ids.discard(request_id)
            if not self._request_ids:
                self._busy_s += time.monotonic() - self._busy_since

    @property
    def _generating_s(self) -> float:
        """The seconds in which at least one request was in the engine. A pause for new weights counts too, if a request
        waits for its end."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._request_ids else 0.0)

    def _read_folder(self) -> None:
        self._stop_ids = list(stop_token_ids(self._model_path))
        self._shapes = tensor_shapes(self._model_path)

    def _opened(self, policy_version: int) -> None:
        self.policy_version = policy_version
        self._broken = ""

    def _stages(self, announcement: weights_pb2.AnnounceRequest) -> None:
        """A version begins to be received. Call it before the workers are told. Raises WeightPushFailed, and changes
        nothing, unless the push has exactly the tensors of the model."""
        check_manifest(announcement.manifest, self._shapes)
        self._staged, self.retained_version = announcement, None

    def _loaded(self, announcement: weights_pb2.AnnounceRequest, bucket_checksums: Sequence[str]) -> None:
        """The version of an earlier `_stages` serves. Call it while nothing decodes. The next version may be staged
        already, into other buckets."""
        version = announcement.manifest.policy_version
        self.policy_version, self.weights_digest = version, weights_digest(bucket_checksums)
        is_kept = announcement.manifest.retain and announcement.transport != "shm"  # those pages are the publisher's
        self.retained_version = version if is_kept else None
        self._num_loads += 1
        if self._staged is announcement:
            self._staged = None

    def _salt(self, policy_version: int, num_loads: int) -> str:
        """The salt of prefix-cache entries of requests that are submitted under this load. A version that is loaded
        again shares no entry with its first load."""
        return f"{policy_version}.{num_loads}"

    def _check_length(self, request: GenerateRequest, max_model_len: int) -> None:
        num_tokens = len(request.prompt_token_ids)
        if not 0 < num_tokens < max_model_len:
            raise InvalidInput("prompt_token_ids", f"{num_tokens} tokens are not between 1 and {max_model_len - 1}")
