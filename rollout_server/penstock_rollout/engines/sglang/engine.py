"""The SGLang engine: SGLang's server in a child process, called by HTTP; weights staged in its scheduler processes.

How a version flips: each scheduler process receives and hashes the new weights in threads while it decodes
(plugin.py). Then SGLang is paused, loads the staged weights with the new version number, and is resumed. SGLang stamps
the tokens itself, exactly, because no step is in flight then: its overlap scheduler, which could leave one, is off if
the KV cache is kept; otherwise the pause drains the step. It reports the versions at the end of a response only. Tokens
before the first flip belong to the version at submission; those of a stream after a flip are held back until its end.

Prefix-cache entries are salted with the load under which a request was submitted. A request without a token at the
time of a flip is submitted again. So a request that starts under one load never finds KV of another.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cancellation import end_task
from penstock.config.rollout import EngineConfig
from penstock.errors import ConfigError, InvalidInput, Unavailable, WeightPushFailed
from penstock.machine import free_port
from penstock.trajectory import FinishReason
from penstock.v1 import weights_pb2
from penstock_rollout.engines.engine import CommitReport, Engine, EngineStats, GenerateRequest, TokenChunk
from penstock_rollout.engines.sglang.calls import FIRST_TOKEN_ONLY, Response, SglangCalls, generate_body
from penstock_rollout.engines.sglang.plugin import StageCalls, announce_plugin
from penstock_rollout.engines.sglang.server import HOST, LAUNCH_MODULE, SglangServer, honours_seeds, server_arguments

logger = logging.getLogger(__name__)

ABORT_GRACE_S = 1.0

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
_ABORTED = TokenChunk((), (), (), "aborted")


@dataclass
class _Running:
    """A request from its submission to its end."""

    version: int = -1
    """The version under which it was submitted."""
    is_submitted: bool = False
    has_begun: bool = False
    """A token has arrived."""
    spans_flip: bool = False
    """The version has flipped since the first token. The versions of later tokens are known only at the end."""
    rid: str = ""
    interrupted: bool = False
    """It was aborted by `interrupt`, which is not a failure."""
    superseded: bool = False
    """It was aborted before its first token and will be submitted again under a newer version."""


class SglangEngine(Engine):
    """It can be started once and stopped once."""

    name = "sglang"

    def __init__(
        self, config: EngineConfig, model_path: Path, dtype: str, seed: int, *, module: str = LAUNCH_MODULE
    ) -> None:
        super().__init__(config, model_path, dtype, seed)
        self._module = module
        self._seeds = random.Random(seed)
        self._running: dict[str, _Running] = {}
        self._control = asyncio.Lock()
        self._open = asyncio.Event()
        """Cleared during a flip. A request that arrives then is submitted after the flip, under the new version."""
        self._idle = asyncio.Event()
        """Set while no request runs."""
        self._folder: Path | None = None
        """Private to this engine: the sockets of SGLang's schedulers, and the names by which versions are loaded."""
        self._schedulers: StageCalls
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: SglangServer | None = None
        self._calls: SglangCalls

    async def start(self, policy_version: int) -> None:
        self._read_folder()
        port = free_port(HOST)
        arguments = server_arguments(
            self._config, self._model_path, self._dtype, self._seed, policy_version=policy_version, port=port
        )
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-sglang-"))
        self._schedulers = StageCalls(self._folder, self._config.tensor_parallel_size)
        self._server = SglangServer(self._module, arguments, port, self._break, announce_plugin(self._folder))
        self._calls = self._server.calls
        await self._server.start()
        if not self._schedulers.are_served:
            raise ConfigError("SGLang did not load Penstock's plugin; its output says why")
        self.devices = await self._schedulers.devices()
        self._opened(policy_version)
        self._open.set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        await self.check_health()
        self._check(request)
        with self._serving(request.request_id):
            running = self._running[request.request_id] = _Running()
            self._idle.clear()
            try:
                while True:
                    await self._open.wait()
                    if self._stopping or running.interrupted:
                        yield _ABORTED
                        return
                    await self.check_health()
                    running.version, running.is_submitted, running.superseded = self.policy_version, True, False
                    async with aclosing(self._submit(request, running)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                    if not running.superseded:
                        return
                    running.is_submitted = False
            finally:
                del self._running[request.request_id]
                if not self._running:
                    self._idle.set()

    def _check(self, request: GenerateRequest) -> None:
        if request.constraint is not None:
            raise InvalidInput(
                "response_format", "or a constrained tool call cannot be used with the sglang engine; use vllm or torch"
            )
        if request.sampling.min_p:
            raise InvalidInput(
                "sampling.min_p", "SGLang reports no log-probs under min_p; use top_k, or another engine"
            )
        self._check_length(request, self._config.max_model_len)
        if request.sampling.seed is not None and not honours_seeds(self._config):
            raise InvalidInput("sampling.seed", "SGLang uses seeds only with enable_deterministic_inference")

    async def _submit(self, request: GenerateRequest, running: _Running) -> AsyncGenerator[TokenChunk]:
        """Submit the request to SGLang once. Yields nothing if the request is superseded."""
        running.rid = uuid.uuid4().hex
        response = Response(running.version)
        has_ended = False
        try:
            async with aclosing(self._calls.generate(self._body(request, running))) as messages:
                async for message in messages:
                    if running.superseded:
                        return
                    response.add(message, request.sampling)
                    running.has_begun = bool(response.token_ids)
                    if response.finish_reason is not None:
                        has_ended = True
                        yield self._last_chunk(response, running, response.finish_reason)
                        return
                    if request.stream and not running.spans_flip:
                        yield response.take()
            if not running.superseded:
                raise Unavailable(f"SGLang ended the response to request {request.request_id} before it was finished")
        except Unavailable:
            if not self._stopping:
                raise
            yield _ABORTED if running.spans_flip else response.take("aborted")
        finally:
            if not has_ended and not self._stopping:
                self._spawn(self._abort(running.rid))

    def _body(self, request: GenerateRequest, running: _Running) -> dict[str, object]:
        seed = request.sampling.seed
        room = self._config.max_model_len - len(request.prompt_token_ids)
        return generate_body(
            running.rid,
            request.prompt_token_ids,
            request.sampling,
            max_tokens=min(request.sampling.max_tokens, room),
            stop_ids=self._stop_ids,
            # Never None: SGLang would use the same seed for all such requests, and samples of a prompt would be equal.
            seed=self._seeds.getrandbits(63) if seed is None else seed % 2**63,
            salt=self._salt(running.version, self._num_loads),
            chunk_tokens=request.min_chunk_tokens if request.stream else FIRST_TOKEN_ONLY,
        )

    def _last_chunk(self, response: Response, running: _Running, reason: dict[str, Any]) -> TokenChunk:
        if "status_code" in reason and not self._stopping and not running.interrupted:
            raise Unavailable(f"SGLang aborted a request: {reason.get('message', reason)}")
        if response.spans is None and running.spans_flip and len(response.token_ids) > response.num_delivered:
            raise Unavailable("SGLang did not report which version produced which tokens of a response")
        return response.take(_FINISH_REASONS.get(reason["type"], "aborted"))

    async def _abort(self, rid: str) -> None:
        with suppress(Unavailable):
            await self._calls.abort(rid)

    async def interrupt(self, request_ids: Collection[str]) -> None:
        for running in [self._running[name] for name in request_ids if name in self._running]:
            running.interrupted = True
            if running.is_submitted:
                await self._abort(running.rid)

    async def stage_weights(self, announcement: weights_pb2.AnnounceRequest) -> None:
        self._stages(announcement)
        await self._schedulers.stage(announcement)

    async def commit_weights(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> CommitReport:
        staged = self._staged
        receive_s = await self._schedulers.verify(policy_version, bucket_checksums, timeout_s)
        assert staged is not None and staged.manifest.policy_version == policy_version
        return await asyncio.shield(asyncio.create_task(self._flip(staged, bucket_checksums, receive_s)))

    async def _flip(
        self, staged: weights_pb2.AnnounceRequest, bucket_checksums: list[str], receive_s: float
    ) -> CommitReport:
        """Load the stage and flip. Runs to its end even if the caller is cancelled. If the load fails, the state of the
        weights is unknown: the engine stops serving."""
        assert self._folder is not None
        policy_version, keep = staged.manifest.policy_version, self._config.keep_kv_cache
        async with self._control:
            started = time.monotonic()
            in_flight = len(self._running)
            self._open.clear()
            try:
                await self._calls.pause("in_place" if keep else "retract")
                load_started = time.monotonic()
                await self._calls.load_weights(self._folder / str(policy_version), policy_version, flush_cache=not keep)
                load_s = time.monotonic() - load_started
                self._loaded(staged, bucket_checksums)
                self._supersede_unstarted()
                await self._calls.resume()
                self._open.set()
            except Exception as error:
                self._break(f"loading version {policy_version} failed: {error}")
                with suppress(Unavailable):
                    await self._calls.abort_all()
                raise WeightPushFailed(f"{self._broken}; restart the rollout server") from error
            paused_s = time.monotonic() - started
        return CommitReport(receive_s, load_s, paused_s=paused_s, running_requests=in_flight)

    def _supersede_unstarted(self) -> None:
        """Abort the requests without a token, and mark the others, which continue with the new version. Nothing decodes
        now. `generate` submits the aborted requests again. The aborts are not awaited, because there may be hundreds.
        A superseded request that an abort misses is dropped at its first token."""
        for running in self._running.values():
            if running.has_begun:
                running.spans_flip = True
            elif running.is_submitted:
                running.superseded = True
                self._spawn(self._abort(running.rid))

    def _break(self, why: str) -> None:
        logger.error("the SGLang engine stops serving: %s", why)
        self._broken = self._broken or why
        self._open.set()

    async def abort_weights(self) -> None:
        with suppress(WeightPushFailed):
            await self._schedulers.abort()

    def stats(self) -> EngineStats:
        """Return the load. SGLang's figures are from the last poll, so they are capped by the requests known here."""
        if self._server is None or not self._running:
            return EngineStats(running_requests=0, waiting_requests=0, kv_cache_usage=0.0)
        num_waiting, kv_cache_usage = self._server.load
        held = sum(not running.is_submitted for running in self._running.values())
        without_token = sum(not running.has_begun for running in self._running.values())
        waiting = min(num_waiting + held, without_token)
        return EngineStats(len(self._running) - waiting, waiting, kv_cache_usage, self._generating_s)

    async def check_health(self) -> None:
        await super().check_health()
        if self._server is None or not self._server.is_alive:
            raise Unavailable("SGLang has died; restart the rollout server")

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        self._stopping = True
        self._broken = self._broken or "it was stopped"
        self._open.set()
        if server.is_alive:
            await self.abort_weights()
        if server.is_alive and self._running:  # they may deliver their last tokens for a moment
            with suppress(Unavailable):
                await self._calls.abort_all()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), ABORT_GRACE_S)
        for task in list(self._tasks):
            await end_task(task)
        await server.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
