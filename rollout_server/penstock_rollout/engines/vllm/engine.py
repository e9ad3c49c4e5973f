"""The vLLM engine: AsyncLLM in this process, EngineCore in a child process, weights staged by a worker extension.

How a version flips: a thread of the worker receives and hashes the new weights while decoding goes on. Then the
scheduler is paused, the weights are loaded, the version is set, and the scheduler is resumed. EngineCore does that in
one call (core_flip.py). Where it has no such method, the server makes a call for each. The version stamps of tokens
(stamps.py) are exact because the version changes only while no step is in flight.

Prefix-cache entries are salted with the load under which a request was submitted. A request without a token at the
time of a flip gets the salt of the new load (scheduler.py), or is submitted again where the server makes the calls. So
a request that starts under one load never finds KV of another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config.rollout import EngineConfig
from penstock.errors import InvalidInput, Unavailable, WeightPushFailed
from penstock.trajectory import FinishReason
from penstock.v1 import weights_pb2
from penstock.weights.checksums import weights_digest
from penstock.weights.folder_tensors import tensor_shapes
from penstock_rollout.engines.engine import CommitReport, EngineStats, GenerateRequest, TokenChunk
from penstock_rollout.engines.generating_time import GeneratingTime
from penstock_rollout.engines.manifest_check import check_manifest
from penstock_rollout.engines.model_folder import stop_token_ids
from penstock_rollout.engines.vllm.core_calls import LOAD_TIMEOUT_S, CoreCalls, answer_of
from penstock_rollout.engines.vllm.sampling import sampling_params
from penstock_rollout.engines.vllm.stamps import VersionStamps, create_stamps
from penstock_rollout.engines.vllm.standby import Standby
from penstock_rollout.engines.vllm.start import SchedulerLoad, create_llm, engine_arguments, flips_in_one_call
from penstock_rollout.weights.stage import kept_version_of

logger = logging.getLogger(__name__)

STAGE_POLL_S = 0.005
LONGEST_STAGE_POLL_S = 0.1
STAGE_POLL_SHARE = 0.1
"""How often the stage of a worker is polled: after this share of the time since the first poll, within the bounds. A
call must not block the worker, which decodes between calls, and several workers answer it at the end of a step only."""
STOP_TIMEOUT_S = 10.0

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}

_Timings = tuple[float, list[tuple[float, float]]]
"""Seconds of the pause; receive_s and load_s of each worker."""


@dataclass
class _Running:
    """A request from its submission to its end."""

    superseded: bool = False
    """It was aborted before its first token and will be submitted again under a newer version."""


class VllmEngine:
    """Implements Engine. It can be started once and stopped once."""

    name = "vllm"

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        dtype: str,
        seed: int,
        *,
        report_experts: bool = False,
        standby: Standby | None = None,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._arguments = engine_arguments(config, model_path, dtype, seed)
        if report_experts:
            self._arguments["enable_return_routed_experts"] = True
        self._standby = standby
        self._load = SchedulerLoad()
        self._policy_version = -1
        self._num_loads = 0
        """Part of the salt of prefix-cache entries: a version that is loaded again shares none with its first load."""
        self._weights_digest = ""
        self._running: dict[str, _Running] = {}
        self._generating = GeneratingTime()
        self._control = asyncio.Lock()
        self._staged: weights_pb2.WeightManifest | None = None
        self._retained_version: int | None = None
        self._kept_next: int | None = None
        """What `_retained_version` becomes when the stage is loaded."""
        self._devices: tuple[str, ...] = ()
        self._broken = "it was not started"
        self._llm: Any = None
        self._calls: CoreCalls
        self._flips_in_one_call = False
        self._stamps: VersionStamps
        self._stop_ids: list[int] = []
        self._shapes: dict[str, tuple[int, ...]] = {}

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

    async def start(self, policy_version: int) -> None:
        self._stop_ids = list(stop_token_ids(self._model_path))
        self._shapes = tensor_shapes(self._model_path)
        self._llm = await asyncio.to_thread(create_llm, self._arguments, self._load, self._standby)
        self._stamps = create_stamps(self._llm)
        self._calls = CoreCalls(self._llm)
        self._flips_in_one_call = flips_in_one_call(self._arguments, self._llm)
        await answer_of(self._llm.get_supported_tasks())
        await answer_of(self._stamps.set_version(policy_version))
        self._devices = tuple(await self._calls.rpc("penstock_device"))
        self._policy_version = policy_version
        self._broken = ""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        await self.check_health()
        if request.request_id in self._running:
            raise InvalidInput("request_id", f"{request.request_id!r} is running already")
        running = self._running[request.request_id] = _Running()
        self._generating.begin()
        try:
            while True:
                async with aclosing(self._submit(request, running)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                if not running.superseded:
                    return
                running.superseded = False
        finally:
            del self._running[request.request_id]
            self._generating.end()
            self._stamps.end(request.request_id)

    async def _submit(self, request: GenerateRequest, running: _Running) -> AsyncGenerator[TokenChunk]:
        """Submit the request to vLLM once. Yields nothing if the request is superseded.

        vLLM's front end knows the request before the first await, so a flip by several calls finds every request that
        it must supersede."""
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        salt = _salt(self._policy_version, self._num_loads)
        prompt = tokens_input(list(request.prompt_token_ids), cache_salt=salt)
        params = sampling_params(request, self._stop_ids)
        num_tokens = 0
        self._stamps.begin(request.request_id)
        try:
            async with aclosing(self._llm.generate(prompt, params, request.request_id)) as outputs:
                async for output in outputs:
                    if running.superseded:
                        return
                    chunk = self._chunk(request.request_id, output.outputs[0], num_tokens)
                    num_tokens += len(chunk.token_ids)
                    yield chunk
        except (VLLMValidationError, ValueError) as error:
            raise InvalidInput(self._refused_field(request), str(error).splitlines()[0]) from error
        except (EngineDeadError, EngineGenerateError) as error:
            if isinstance(error.__cause__, ImportError) and request.constraint is not None:
                raise InvalidInput("response_format", f"vLLM needs a package for it: {error.__cause__}") from error
            raise Unavailable(f"vLLM could not finish request {request.request_id}: {error!r}") from error

    def _refused_field(self, request: GenerateRequest) -> str:
        """The field that vLLM refuses. It checks the constraint before the prompt, and its errors do not say which."""
        fits = len(request.prompt_token_ids) < self._config.max_model_len
        return "response_format" if request.constraint is not None and fits else "prompt_token_ids"

    def _chunk(self, request_id: str, completion: Any, start: int) -> TokenChunk:
        token_ids = tuple(completion.token_ids)
        reason = completion.finish_reason
        return TokenChunk(
            token_ids=token_ids,
            log_probs=tuple(completion.logprobs.logprobs) if token_ids else (),
            segments=self._stamps.segments(request_id, completion, start, start + len(token_ids)),
            finish_reason=None if reason is None else _FINISH_REASONS.get(reason, "aborted"),
            routed_experts=_small_ids(completion.routed_experts) if reason is not None else None,
        )

    async def interrupt(self, request_ids: Collection[str]) -> None:
        running = [request_id for request_id in request_ids if request_id in self._running]
        if running:
            await answer_of(self._llm.abort(running))

    async def stage_weights(self, announcement: weights_pb2.AnnounceRequest) -> None:
        check_manifest(announcement.manifest, self._shapes)
        async with self._control:  # not during a flip, which loads whatever is staged
            self._retained_version = None  # the stage takes the buckets of the version before
            await self._calls.rpc("penstock_stage", announcement.SerializeToString())
            self._staged, self._kept_next = announcement.manifest, kept_version_of(announcement)

    async def commit_weights(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> CommitReport:
        staged = self._staged
        if staged is None or staged.policy_version != policy_version:
            found = staged.policy_version if staged else None
            raise WeightPushFailed(f"version {policy_version} is not staged; {found} is")
        try:
            async with asyncio.timeout(timeout_s):
                await self._received(policy_version)
            report = await asyncio.shield(asyncio.create_task(self._flip(staged, bucket_checksums)))
        except (TimeoutError, WeightPushFailed) as error:
            if self._staged is staged:
                await self.abort_weights()
            if isinstance(error, TimeoutError):
                raise WeightPushFailed(f"version {policy_version} did not arrive within {timeout_s:g} s") from error
            raise
        return report

    async def _received(self, policy_version: int) -> None:
        """Wait until every worker has received the version."""
        started = time.monotonic()
        while True:
            states = await self._calls.rpc("penstock_poll", policy_version)
            for phase, failure in states:
                if phase == "failed":
                    raise WeightPushFailed(failure)
            if all(phase == "received" for phase, _ in states):
                return
            wait_s = STAGE_POLL_SHARE * (time.monotonic() - started)
            await asyncio.sleep(min(max(wait_s, STAGE_POLL_S), LONGEST_STAGE_POLL_S))

    async def _flip(self, staged: weights_pb2.WeightManifest, bucket_checksums: list[str]) -> CommitReport:
        """Verify the stage and load it. No other stage can replace it meanwhile.

        This runs to its end even if the caller is cancelled. If the load fails, the state of the weights is unknown, so
        the engine stops serving for good."""
        policy_version = staged.policy_version
        flip = self._flip_inside if self._flips_in_one_call else self._flip_by_calls
        async with self._control:
            in_flight = len(self._running)
            try:
                paused_s, timings = await flip(policy_version, bucket_checksums)
            except WeightPushFailed:  # the stage does not verify, and nothing was paused
                raise
            except Exception as error:
                self._staged = None
                await self._break(f"loading version {policy_version} failed: {error}")
                raise WeightPushFailed(f"{self._broken}; restart the rollout server") from error
            self._staged = None
        return CommitReport(
            receive_s=max(receive_s for receive_s, _ in timings),
            load_s=max(load_s for _, load_s in timings),
            paused_s=paused_s,
            running_requests=in_flight,
        )

    async def _flip_inside(self, policy_version: int, bucket_checksums: list[str]) -> _Timings:
        """Flip the version by one call to EngineCore, which also counts the pause."""
        mismatch, paused_s, timings = await self._calls.flip(
            policy_version,
            bucket_checksums,
            _salt(policy_version, self._num_loads + 1),
            clear_cache=not self._config.keep_kv_cache,
        )
        if mismatch:
            raise WeightPushFailed(mismatch)
        self._has_loaded(policy_version, bucket_checksums)
        return paused_s, timings

    async def _flip_by_calls(self, policy_version: int, bucket_checksums: list[str]) -> _Timings:
        """Flip the version by a call for each stage. Decoding stops while they go back and forth."""
        mismatches = await self._calls.rpc("penstock_mismatch", policy_version, bucket_checksums)
        if found := next(filter(None, mismatches), ""):
            raise WeightPushFailed(found)
        started = time.monotonic()
        await self._calls.pause(clear_cache=not self._config.keep_kv_cache)
        timings = await self._calls.rpc("penstock_commit", timeout_s=LOAD_TIMEOUT_S)
        await answer_of(self._stamps.set_version(policy_version))
        self._has_loaded(policy_version, bucket_checksums)
        await self._supersede_unstarted()
        await self._calls.resume()
        return time.monotonic() - started, timings

    def _has_loaded(self, policy_version: int, bucket_checksums: list[str]) -> None:
        self._policy_version, self._weights_digest = policy_version, weights_digest(bucket_checksums)
        self._num_loads += 1
        self._retained_version = self._kept_next

    async def _supersede_unstarted(self) -> None:
        """Abort the requests without a token; `generate` submits them again under the new version."""
        unstarted = [request_id for request_id in self._running if not self._stamps.has_token(request_id)]
        for request_id in unstarted:
            self._running[request_id].superseded = True
        if unstarted:
            await answer_of(self._llm.abort(unstarted))

    async def _break(self, why: str) -> None:
        logger.error("the vLLM engine stops serving: %s", why)
        self._broken = why
        await answer_of(self._llm.abort(list(self._running)))

    async def abort_weights(self) -> None:
        async with self._control:
            self._staged = None
            await self._calls.rpc("penstock_abort")

    def stats(self) -> EngineStats:
        waiting = min(self._load.waiting_requests, len(self._running))
        return EngineStats(
            running_requests=len(self._running) - waiting,
            waiting_requests=waiting,
            kv_cache_usage=self._load.kv_cache_usage,
            generating_s=self._generating.seconds,
        )

    async def check_health(self) -> None:
        if self._broken:
            raise Unavailable(f"the vLLM engine cannot generate: {self._broken}")
        if self._llm.errored:
            raise Unavailable("vLLM's EngineCore has died; restart the rollout server")

    async def stop(self) -> None:
        if self._standby is not None:
            self._standby.close()
        if self._llm is None:
            return
        self._broken = "it was stopped"
        llm, self._llm = self._llm, None
        with suppress(Unavailable):
            await answer_of(llm.abort(list(self._running)))
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        await asyncio.to_thread(llm.shutdown, timeout=STOP_TIMEOUT_S)
        llm.shutdown = lambda: None  # its finalizer calls it again, which fails while the interpreter exits


def _salt(policy_version: int, num_loads: int) -> str:
    """The salt of prefix-cache entries of requests that are submitted under this load."""
    return f"{policy_version}.{num_loads}"


def _small_ids(experts: Any) -> Any:
    """vLLM's ids of experts, as one or two bytes each. None if it reports none."""
    if experts is None or experts.dtype.itemsize <= 2:
        return experts
    return experts.astype(np.uint8 if experts.max(initial=0) < 256 else np.uint16)
