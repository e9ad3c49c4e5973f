"""The torch engine: continuous batching over a Hugging Face model, on any platform. Tests use it as a reference.

One thread owns the model and steps the batch. Requests join and leave, and new weights are loaded, between two steps.
It has no paged KV, chunked prefill, tensor parallelism, or models whose state is not a KV cache, on purpose.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import Future
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch

from penstock.config.rollout import EngineConfig
from penstock.errors import Unavailable
from penstock.v1 import weights_pb2
from penstock_rollout.engines.engine import CommitReport, Engine, EngineStats, GenerateRequest, TokenChunk
from penstock_rollout.engines.torch.batch import ConstraintCompiler, DecodeBatch, ExpertRecorder, Row
from penstock_rollout.weights.stage import StageSlot, WeightStage, device_uuid

logger = logging.getLogger(__name__)

ACTION_TIMEOUT_S = 600.0
"""Timeout of an action between two steps. It may have to wait for a prefill."""
STOP_TIMEOUT_S = 10.0

_T = TypeVar("_T")


class TorchEngine(Engine):
    """It can be started once and stopped once."""

    name = "torch"

    def __init__(
        self, config: EngineConfig, model_path: Path, dtype: str, seed: int, *, report_experts: bool = False
    ) -> None:
        super().__init__(config, model_path, dtype, seed)
        self._report_experts = report_experts
        self._queues: dict[Row, asyncio.Queue[TokenChunk | Unavailable]] = {}
        self._changed = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._actions: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._model: Any
        self._slot: StageSlot
        self._batch: DecodeBatch
        self._constraints: ConstraintCompiler

    async def start(self, policy_version: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_folder()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = await asyncio.to_thread(load_model, self._model_path, self._dtype, device)
        self.devices = (device_uuid(self._model.device),)
        self._slot = StageSlot(self._model_path, self._model.device)
        recorder = ExpertRecorder(self._model) if self._report_experts else None
        self._batch = DecodeBatch(
            self._model, frozenset(self._stop_ids), self._config.max_model_len, self._seed, recorder
        )
        self._constraints = ConstraintCompiler(self._model_path, self._model.config.get_text_config().vocab_size)
        self._opened(policy_version)
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        await self.check_health()
        self._check_length(request, self._config.max_model_len)
        with self._serving(request.request_id):
            constraint = None
            if request.constraint is not None:
                constraint = await asyncio.to_thread(self._constraints.compile, request.constraint)
            row = self._batch.new_row(request, constraint)
            queue = self._queues[row] = asyncio.Queue()
            try:
                self._change(lambda: self._waiting.append(row))
                while True:
                    chunk = await queue.get()
                    if isinstance(chunk, Unavailable):
                        raise chunk
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
            finally:
                row.cancelled = True
                del self._queues[row]
                self._change(lambda: None)

    async def interrupt(self, request_ids: Collection[str]) -> None:
        wanted = frozenset(request_ids)
        rows = [row for row in self._queues if row.request.request_id in wanted]

        def end() -> None:
            for row in rows:
                if row.finish_reason is None:
                    row.finish_reason = "aborted"
                    row.cancelled = True  # so that the next step drops it
            self._deliver(rows)

        await self._between_steps(end)

    async def stage_weights(self, announcement: weights_pb2.AnnounceRequest) -> None:
        self._stages(announcement)
        self._slot.begin(announcement)

    async def commit_weights(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> CommitReport:
        stage = await asyncio.to_thread(self._slot.verified, policy_version, bucket_checksums, timeout_s)
        in_flight = len(self._queues)
        load_s = await self._between_steps(lambda: self._flip(stage, bucket_checksums))
        return CommitReport(stage.receive_s, load_s, paused_s=load_s, running_requests=in_flight)

    async def abort_weights(self) -> None:
        self._slot.abort()

    def stats(self) -> EngineStats:
        waiting = min(len(self._waiting), len(self._queues))
        capacity = self._config.max_num_seqs * self._config.max_model_len
        return EngineStats(
            running_requests=len(self._queues) - waiting,
            waiting_requests=waiting,
            kv_cache_usage=self._batch.num_cached_tokens / capacity,
            generating_s=self._generating_s,
        )

    async def stop(self) -> None:
        if self._thread is None:
            return
        self._broken = self._broken or "it was stopped"
        await self.abort_weights()
        self._change(lambda: setattr(self, "_stopping", True))
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    def _change(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._changed.notify()

    async def _between_steps(self, action: Callable[[], _T]) -> _T:
        """Run the action in the engine's thread between two steps. It runs even if the caller is cancelled."""
        await self.check_health()
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)

        self._change(lambda: self._actions.append(run))
        try:
            async with asyncio.timeout(ACTION_TIMEOUT_S):
                return await asyncio.shield(asyncio.wrap_future(done))
        except TimeoutError as error:
            raise Unavailable(f"the torch engine did not answer within {ACTION_TIMEOUT_S:g} s") from error

    def _flip(self, stage: WeightStage, bucket_checksums: list[str]) -> float:
        """Load the stage, in the engine's thread. No copy can fail, because the manifest was checked at the start."""
        started = time.monotonic()
        load_into(self._model, dict(stage.tensors()))
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        self._loaded(stage.announcement, bucket_checksums)
        self._slot.loaded = stage
        if not self._config.keep_kv_cache:
            self._waiting.extendleft(reversed(self._batch.release()))
        return time.monotonic() - started

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_once()
            rows = [*self._batch.release(), *self._waiting]
            for row in rows:
                row.finish_reason = "aborted"
            self._deliver(rows)
        except Exception as error:
            logger.exception("the torch engine failed")
            self._broken = repr(error)
            self._loop.call_soon_threadsafe(self._fail_all)

    def _run_once(self) -> None:
        """Wait for work. Then run the actions, step once, and add waiting requests to the batch."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._actions or self._waiting or self._batch.rows)
            actions = [self._actions.popleft() for _ in range(len(self._actions))]
        for action in actions:
            action()
        self._batch.drop_ended()
        stepping = list(self._batch.rows)
        if stepping:
            self._batch.step(self.policy_version)
        joining = self._take_waiting()
        if joining:
            self._batch.join(joining, self.policy_version)
        self._deliver(stepping + joining)

    def _take_waiting(self) -> list[Row]:
        taken: list[Row] = []
        with self._changed:
            while self._waiting and len(self._batch.rows) + len(taken) < self._config.max_num_seqs:
                row = self._waiting.popleft()
                if not row.cancelled:
                    taken.append(row)
        return taken

    def _deliver(self, rows: list[Row]) -> None:
        """Pass the chunks of a whole step to the event loop in one call."""
        ready = [row for row in rows if row.has_chunk]
        if ready:
            self._loop.call_soon_threadsafe(self._put, [(row, row.take_chunk()) for row in ready])

    def _put(self, chunks: list[tuple[Row, TokenChunk]]) -> None:
        for row, chunk in chunks:
            if (queue := self._queues.get(row)) is not None:
                queue.put_nowait(chunk)

    def _fail_all(self) -> None:
        for queue in self._queues.values():
            queue.put_nowait(Unavailable(f"the torch engine failed: {self._broken}"))


def load_model(folder: Path, dtype: str, device: str) -> Any:
    """Load a causal model, or whole a composite one, which sees or hears besides. It is given text alone."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForMultimodalLM
    return kind.from_pretrained(folder, dtype=dtype).to(device).eval()


@torch.no_grad()
def load_into(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the tensors, named as in the model's folder, into the model. Where the model holds them in another form,
    such as fused experts, Hugging Face converts them as it does when it loads the folder. This takes the memory of a
    second model for a moment. A composite model's other parts, which are not pushed, stay as they are."""
    state = model.state_dict()
    if not tensors.keys() <= state.keys():
        config = deepcopy(model.config)
        converted, info = type(model).from_pretrained(
            None, config=config, state_dict=dict(tensors), dtype=model.dtype, output_loading_info=True
        )
        tensors = {name: t for name, t in converted.state_dict().items() if name not in info["missing_keys"]}
    for name, tensor in tensors.items():
        state[name].copy_(tensor)
