"""The vLLM engine: AsyncLLM in this process, EngineCore in a child process, weights staged by a worker extension.

core.py says how a version flips between two steps, and how the entries of the prefix cache are salted.

`VersionStamps` stamps tokens with the version that produced them, as they arrive in this process. vLLM itself reports
versions only since 0.32, and GPU hosts may be bound to 0.26 by their driver and CUDA. So no vLLM is asked for them; a
test compares these stamps with those of 0.32. The stamps are exact: when EngineCore flips a version, it sends a mark,
after the last token of the old version and before the first of the new one, on the same socket.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock.config.rollout import EngineConfig
from penstock.errors import InvalidInput, Unavailable, WeightPushFailed
from penstock.trajectory import FinishReason, VersionSegment
from penstock.v1 import weights_pb2
from penstock_rollout.engines.engine import (
    CommitReport,
    Engine,
    EngineStats,
    GenerateRequest,
    OutputConstraint,
    TokenChunk,
    segments_of,
)
from penstock_rollout.engines.vllm.standby import Standby
from penstock_rollout.engines.vllm.start import (
    CHUNK_TOKENS,
    CONTROL_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    PROFILES,
    VERSION_MARK,
    SchedulerLoad,
    create_llm,
    engine_arguments,
)

logger = logging.getLogger(__name__)

STAGE_POLL_S = 0.005
LONGEST_STAGE_POLL_S = 0.1
STAGE_POLL_SHARE = 0.1
"""How often the stage of a worker is polled: after this share of the time since the first poll, within the bounds. A
call must not block the worker, which decodes between calls, and several workers answer it at the end of a step only."""
STOP_TIMEOUT_S = 10.0
PROFILE_TIMEOUT_S = 30.0
"""How long a push waits for a worker that writes a trace: less than `learner.push_timeout_s`."""
FLIP_TIMEOUT_S = LOAD_TIMEOUT_S + 2 * CONTROL_TIMEOUT_S
"""Timeout of a flip inside EngineCore: the calls to verify and to load the stage, and the steps in between."""
MAX_CHUNK_TOKENS = 16
"""Most tokens that EngineCore keeps before it sends them. An interrupt loses the kept tokens."""

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_T = TypeVar("_T")


class VllmEngine(Engine):
    """It can be started once and stopped once."""

    name = "vllm"

    def __init__(
        self, config: EngineConfig, model_path: Path, dtype: str, seed: int, *, report_experts: bool = False,
        standby: Standby | None = None, profiles: Path = PROFILES,
    ) -> None:  # fmt: skip
        super().__init__(config, model_path, dtype, seed)
        self._arguments = engine_arguments(config, model_path, dtype, seed, profiles)
        if report_experts:
            self._arguments["enable_return_routed_experts"] = True
        self._standby = standby
        self.load = SchedulerLoad()
        """The latest figures of vLLM's scheduler."""
        self._control = asyncio.Lock()
        self._is_profiling = False
        self._llm: Any = None
        self._stamps: VersionStamps

    async def start(self, policy_version: int) -> None:
        self._read_folder()
        core_process = [self._standby.when_ready] if self._standby is not None else []
        self._llm = await asyncio.to_thread(create_llm, self._arguments, self.load, *core_process)
        self._stamps = VersionStamps(self._llm)
        await answer_of(self._llm.get_supported_tasks())
        self._stamps.policy_version = policy_version
        self.devices = tuple(await self._rpc("penstock_device"))
        self._opened(policy_version)
        await self._begin_profile()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        await self.check_health()
        salt = self._salt(self.policy_version, self._num_loads)
        prompt = tokens_input(list(request.prompt_token_ids), cache_salt=salt)
        params = sampling_params(request, self._stop_ids)
        num_tokens = 0
        with self._serving(request.request_id), self._stamps.of(request.request_id):
            try:
                async with aclosing(self._llm.generate(prompt, params, request.request_id)) as outputs:
                    async for output in outputs:
                        chunk = self._chunk(request.request_id, output.outputs[0], num_tokens)
                        num_tokens += len(chunk.token_ids)
                        yield chunk
            except (VLLMValidationError, ValueError) as error:
                # vLLM checks the constraint before the prompt, and its errors do not say which it refuses.
                fits = len(request.prompt_token_ids) < self._config.max_model_len
                field = "response_format" if request.constraint is not None and fits else "prompt_token_ids"
                raise InvalidInput(field, str(error).splitlines()[0]) from error
            except (EngineDeadError, EngineGenerateError) as error:
                if isinstance(error.__cause__, ImportError) and request.constraint is not None:
                    raise InvalidInput("response_format", f"vLLM needs a package for it: {error.__cause__}") from error
                raise Unavailable(f"vLLM could not finish request {request.request_id}: {error!r}") from error

    def _chunk(self, request_id: str, completion: Any, start: int) -> TokenChunk:
        token_ids = tuple(completion.token_ids)
        reason = completion.finish_reason
        return TokenChunk(
            token_ids=token_ids,
            log_probs=tuple(completion.logprobs.logprobs) if token_ids else (),
            segments=self._stamps.segments(request_id, completion, start),
            finish_reason=None if reason is None else _FINISH_REASONS.get(reason, "aborted"),
            routed_experts=_small_ids(completion.routed_experts) if reason is not None else None,
        )

    async def interrupt(self, request_ids: Collection[str]) -> None:
        running = [request_id for request_id in request_ids if request_id in self._request_ids]
        if running:
            await answer_of(self._llm.abort(running))

    async def stage_weights(self, announcement: weights_pb2.AnnounceRequest) -> None:
        async with self._control:  # not during a flip, which loads whatever is staged
            self._stages(announcement)
            await self._rpc("penstock_stage", announcement.SerializeToString())

    async def commit_weights(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> CommitReport:
        staged = self._staged
        if staged is None or staged.manifest.policy_version != policy_version:
            found = staged.manifest.policy_version if staged else None
            raise WeightPushFailed(f"version {policy_version} is not staged; {found} is")
        try:
            async with asyncio.timeout(timeout_s):
                await self._received(policy_version)
            return await asyncio.shield(asyncio.create_task(self._flip(staged, bucket_checksums)))
        except (TimeoutError, WeightPushFailed) as error:
            if self._staged is staged:
                await self.abort_weights()
            if isinstance(error, TimeoutError):
                raise WeightPushFailed(f"version {policy_version} did not arrive within {timeout_s:g} s") from error
            raise

    async def _received(self, policy_version: int) -> None:
        """Wait until every worker has received the version."""
        started = time.monotonic()
        while True:
            states = await self._rpc("penstock_poll", policy_version)
            for phase, failure in states:
                if phase == "failed":
                    raise WeightPushFailed(failure)
            if all(phase == "received" for phase, _ in states):
                return
            wait_s = STAGE_POLL_SHARE * (time.monotonic() - started)
            await asyncio.sleep(min(max(wait_s, STAGE_POLL_S), LONGEST_STAGE_POLL_S))

    async def _flip(self, staged: weights_pb2.AnnounceRequest, bucket_checksums: list[str]) -> CommitReport:
        """Verify the stage and load it, by one call to EngineCore (core.py). No other stage can replace it meanwhile.
        This runs to its end even if the caller is cancelled. If the load fails, the state of the weights is unknown, so
        the engine stops serving for good."""
        policy_version, clear_cache = staged.manifest.policy_version, not self._config.keep_kv_cache
        async with self._control:
            await self._end_profile()
            in_flight = len(self._request_ids)
            salt = self._salt(policy_version, self._num_loads + 1)
            flip = self._llm.engine_core.call_utility_async(
                "penstock_flip", policy_version, bucket_checksums, salt, clear_cache
            )
            try:
                mismatch, paused_s, timings = await answer_of(flip, FLIP_TIMEOUT_S)
            except Exception as error:
                self._staged = None
                await self._break(f"loading version {policy_version} failed: {error}")
                raise WeightPushFailed(f"{self._broken}; restart the rollout server") from error
            if mismatch:  # nothing was paused
                raise WeightPushFailed(mismatch)
            self._loaded(staged, bucket_checksums)
            await self._begin_profile()
        return CommitReport(
            receive_s=max(receive_s for receive_s, _ in timings),
            load_s=max(load_s for _, load_s in timings),
            paused_s=paused_s,
            running_requests=in_flight,
        )

    async def _break(self, why: str) -> None:
        logger.error("the vLLM engine stops serving: %s", why)
        self._broken = why
        await answer_of(self._llm.abort(list(self._request_ids)))

    async def _begin_profile(self) -> None:
        """Record the serving version from here on, if it is one of `profile_versions`. A profile that fails is reported
        in the log; the engine serves."""
        if self.policy_version in self._config.profile_versions:
            self._is_profiling = True
            await self._profile("start_profile", f"version-{self.policy_version}")

    async def _end_profile(self) -> None:
        """Write the trace, unless vLLM has done so after PROFILED_STEPS."""
        if self._is_profiling:
            self._is_profiling = False
            await self._profile("stop_profile")

    async def _profile(self, method: str, *arguments: str) -> None:
        try:
            await answer_of(getattr(self._llm, method)(*arguments), PROFILE_TIMEOUT_S)
        except Exception as error:  # vLLM raises many types
            logger.error("the profile of version %d failed: %s", self.policy_version, error)

    async def _rpc(self, method: str, *args: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> list[Any]:
        """Call a method of every worker. Returns the results in rank order."""
        return list(await answer_of(self._llm.collective_rpc(method, timeout=timeout_s, args=args), timeout_s))

    async def abort_weights(self) -> None:
        async with self._control:
            self._staged = None
            await self._rpc("penstock_abort")

    def stats(self) -> EngineStats:
        waiting = min(self.load.waiting_requests, len(self._request_ids))
        return EngineStats(
            running_requests=len(self._request_ids) - waiting,
            waiting_requests=waiting,
            kv_cache_usage=self.load.kv_cache_usage,
            generating_s=self._generating_s,
        )

    async def check_health(self) -> None:
        await super().check_health()
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
            await answer_of(llm.abort(list(self._request_ids)))
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        await asyncio.to_thread(llm.shutdown, timeout=STOP_TIMEOUT_S)
        llm.shutdown = lambda: None  # its finalizer calls it again, which fails while the interpreter exits


def sampling_params(request: GenerateRequest, stop_ids: list[int]) -> Any:
    """Return the sampling parameters of a request, as vLLM takes them. `stop_ids` end a response, unless the request
    ignores them. A constrained request also ends at the tokenizer's own end token. It is the only one that vLLM 0.26
    lets a constrained text end with, and what follows the end is not constrained."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = request.sampling
    chunk_tokens = min(request.min_chunk_tokens, MAX_CHUNK_TOKENS) if request.stream else MAX_CHUNK_TOKENS
    # By this parameter vLLM's front end delivers several tokens at once. Where it lacks it, each is a chunk.
    is_known = request.min_chunk_tokens > 1 and hasattr(SamplingParams, "stream_interval")
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        seed=None if sampling.seed is None else sampling.seed % 2**63,  # vLLM reads -1 as "no seed"
        ignore_eos=request.constraint is None,
        stop_token_ids=[] if sampling.ignore_eos else stop_ids,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        extra_args={CHUNK_TOKENS: chunk_tokens} if chunk_tokens > 1 else None,
        structured_outputs=None if request.constraint is None else _structured_outputs(request.constraint),
        **({"stream_interval": request.min_chunk_tokens} if is_known else {}),
    )


def _structured_outputs(constraint: OutputConstraint) -> Any:
    """vLLM masks the logits before anything else, so that the processed log-probs are those of what may be sampled."""
    from vllm.sampling_params import StructuredOutputsParams

    if constraint.kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    field = "json" if constraint.kind == "json_schema" else "structural_tag"
    return StructuredOutputsParams(**{field: constraint.text})


async def answer_of(call: Awaitable[_T], timeout_s: float = CONTROL_TIMEOUT_S) -> _T:
    """Await a call to EngineCore. Raises Unavailable if it is dead or does not answer in time."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise Unavailable(f"vLLM's EngineCore did not answer within {timeout_s:g} s") from error
    except EngineDeadError as error:
        raise Unavailable("vLLM's EngineCore has died; restart the rollout server") from error


def _small_ids(experts: Any) -> Any:
    """vLLM's ids of experts, as one or two bytes each. None if it reports none."""
    if experts is None or experts.dtype.itemsize <= 2:
        return experts
    return experts.astype(np.uint8 if experts.max(initial=0) < 256 else np.uint16)


@dataclass
class _Stamped:
    """The tokens of a request that have arrived."""

    num_tokens: int = 0
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Each version, and the index of its first token."""

    def add(self, num_tokens: int, policy_version: int) -> None:
        if not self.starts or self.starts[-1][0] != policy_version:
            self.starts.append((policy_version, self.num_tokens))
        self.num_tokens += num_tokens


class VersionStamps(asyncio.Queue[Any]):
    """Which version produced which token of a request. It is the queue between the task that reads EngineCore's socket
    and vLLM's output handler. Create it before the first call to EngineCore: that task uses the queue that exists when
    it starts. Requests have the id under which they were submitted."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        assert llm.engine_core.resources.output_queue_task is None
        self._states = llm.output_processor.request_states
        self.policy_version = -1
        """The version of the tokens that arrive now. Set it before the first request; then EngineCore's marks do."""
        self._requests: dict[str, _Stamped] = {}
        llm.engine_core.outputs_queue = self

    @contextmanager
    def of(self, request_id: str) -> Iterator[None]:
        """Within the block, the tokens of the request are stamped."""
        self._requests[request_id] = _Stamped()
        try:
            yield
        finally:
            del self._requests[request_id]

    def segments(self, request_id: str, completion: Any, start: int) -> tuple[VersionSegment, ...]:
        """Return the versions of the tokens that came with `completion`, of which `start` is the first."""
        return segments_of(self._requests[request_id].starts, start, start + len(completion.token_ids))

    def put_nowait(self, item: Any) -> None:
        for output in () if isinstance(item, Exception) else item.outputs:
            state = self._states.get(output.request_id)  # None if the request was aborted
            if state is None and output.request_id.startswith(VERSION_MARK):
                self.policy_version = int(output.request_id.removeprefix(VERSION_MARK))
            stamped = self._requests.get(state.external_req_id) if state is not None else None
            if stamped is not None and output.new_token_ids:
                stamped.add(len(output.new_token_ids), self.policy_version)
        super().put_nowait(item)
