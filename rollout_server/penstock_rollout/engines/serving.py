"""What every engine shares: the version that it serves, the one that is staged, and the time in which it generates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.config.rollout import EngineConfig
from penstock.errors import InvalidInput, Unavailable
from penstock.v1 import weights_pb2
from penstock.weights.folder_tensors import stop_token_ids, tensor_shapes
from penstock.weights.manifest import weights_digest
from penstock_rollout.engines.engine import GenerateRequest
from penstock_rollout.weights.stage import check_manifest


class ServingEngine:
    """The bookkeeping of versions, which is the same for every engine.

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
        self._policy_version = -1
        self._weights_digest = ""
        self._retained_version: int | None = None
        self._staged: weights_pb2.AnnounceRequest | None = None
        """The newest announcement that was not loaded or dropped yet."""
        self._num_loads = 0
        self._stop_ids: list[int] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._devices: tuple[str, ...] = ()
        self._request_ids: set[str] = set()
        """Requests between their submission and their end."""
        self._generating = GeneratingTime()
        self._broken = "it was not started"
        """Why the engine cannot generate, or an empty text."""

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def weights_digest(self) -> str:
        return self._weights_digest

    @property
    def retained_version(self) -> int | None:
        return self._retained_version

    @property
    def devices(self) -> tuple[str, ...]:
        return self._devices

    async def check_health(self) -> None:
        if self._broken:
            raise Unavailable(f"the {self.name} engine cannot generate: {self._broken}")

    @contextmanager
    def _serving(self, request_id: str) -> Iterator[None]:
        """Surrounds one request. Raises InvalidInput if another one with this id runs."""
        if request_id in self._request_ids:
            raise InvalidInput("request_id", f"{request_id!r} is running already")
        self._request_ids.add(request_id)
        self._generating.begin()
        try:
            yield
        finally:
            self._request_ids.discard(request_id)
            self._generating.end()

    def _read_folder(self) -> None:
        """Read what the engine has to know of its model folder."""
        self._stop_ids = list(stop_token_ids(self._model_path))
        self._shapes = tensor_shapes(self._model_path)

    def _opened(self, policy_version: int) -> None:
        """The model folder serves as this version."""
        self._policy_version = policy_version
        self._broken = ""

    def _stages(self, announcement: weights_pb2.AnnounceRequest) -> None:
        """A version begins to be received. Call it before the workers are told.

        Raises WeightPushFailed, and changes nothing, unless the push has exactly the tensors of the model."""
        check_manifest(announcement.manifest, self._shapes)
        self._staged, self._retained_version = announcement, None

    def _loaded(self, announcement: weights_pb2.AnnounceRequest, bucket_checksums: Sequence[str]) -> None:
        """The version of an earlier `_stages` serves. Call it while nothing decodes. The next version may be staged
        already, into other buckets."""
        version = announcement.manifest.policy_version
        self._policy_version, self._weights_digest = version, weights_digest(bucket_checksums)
        is_kept = announcement.manifest.retain and announcement.transport != "shm"  # those pages are the publisher's
        self._retained_version = version if is_kept else None
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


class GeneratingTime:
    """Counts the seconds in which at least one request was in the engine. A pause for new weights counts too, if a
    request waits for its end."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._since = 0.0
        self._ended_s = 0.0

    def begin(self) -> None:
        """A request has arrived."""
        if self._num_requests == 0:
            self._since = time.monotonic()
        self._num_requests += 1

    def end(self) -> None:
        """A request has ended, in whatever way."""
        self._num_requests -= 1
        if self._num_requests == 0:
            self._ended_s += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        return self._ended_s + (time.monotonic() - self._since if self._num_requests else 0.0)
