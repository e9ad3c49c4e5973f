"""Code that runs inside vLLM's own processes, EngineCore and its workers. They end with the server.

vLLM loads it by name (`worker_extension_cls`, `distributed_executor_backend`, `scheduler_cls`). collective_rpc calls
methods of workers between two decode steps, so none blocks. Arguments and results are plain values, never weights.

Flips: the workers stage a version while they decode with the old one, and EngineCore flips all of them between two
steps (`flip`).

Copies: a version is loaded by plain copies, where that is proven to be all that vLLM's loader does. vLLM's reload
prepares every layer for weights that have to be repacked or quantized, in Python, while decoding stands still. Most
models keep their weights as they arrive. `learn` finds out where to copy each tensor, after vLLM's own reload of the
same version, and proves four things or refuses:

- The loader only copies parts of staged tensors into parameters, and fills padding with a number. It reads no values,
  and replaces nothing of a layer.
- These copies reach every element of every parameter, and none twice.
- Each part has the values that the reload left there.
- No layer has anything else that is made from weights: no quantization, no experts, no latent attention.

Chunks: vLLM sends every token of every request to the front end by itself. With hundreds of requests of a small model,
packing and unpacking them takes longer than the model. So a request says how many tokens it wants at once. EngineCore
keeps its tokens until so many are there, the request has ended, or the scheduler is paused. When a pause is answered,
every token has left: the version stamps stay exact. Tokens that are kept of an aborted request are lost.

Salts: the server salts the prefix-cache entries of a request with the load under which it submits the request. If
weights are loaded before its first token, the request gets the salt of that load, and nothing that was computed for it
before is used.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import RequestStatus

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock_rollout.engines.child_process import end_with_parent
from penstock_rollout.engines.vllm.start import CHUNK_TOKENS, CONTROL_TIMEOUT_S, LOAD_TIMEOUT_S, VERSION_MARK
from penstock_rollout.weights.stage import StageSlot, device_uuid

logger = logging.getLogger(__name__)

COPYING_DEVICES = ("cuda",)
"""Where vLLM multiplies with the parameters themselves. On a CPU it multiplies with packed copies of them."""
RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
"""This logger warns at every reload about layers that have no weights: rotary embeddings and tied heads."""
SCHEDULER_LOGGER = "vllm.config.scheduler"
"""This logger warns of every scheduler class that is not vLLM's own, ours too."""
NamedTensors = Sequence[tuple[str, torch.Tensor]]
Flipped = tuple[str, float, list[tuple[float, float]]]
"""Why the stage was refused, or an empty string; seconds of the pause; receive_s and load_s of each worker."""


class WeightStaging:
    """Mixed into vLLM's worker class. It has no constructor, so the stage is created on first use.

    Only `penstock_commit` touches the serving weights, and only with a stage that was received and verified."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: torch.device
    rank: int
    _penstock_copies: Copies | None
    """Set at the first load. None if every version needs vLLM's loader."""

    @functools.cached_property
    def _penstock_slot(self) -> StageSlot:
        return StageSlot(Path(self.model_config.model), self.device, self.rank)

    def penstock_stage(self, announcement: bytes) -> None:
        """Start to receive the version of a serialized AnnounceRequest. Drops an earlier stage."""
        self._penstock_slot.begin(weights_pb2.AnnounceRequest.FromString(announcement))

    def penstock_device(self) -> str:
        """Return `cpu`, or the UUID of this worker's GPU."""
        return device_uuid(self.device)

    def penstock_poll(self, policy_version: int) -> tuple[str, str]:
        """Return the phase of the version's stage and the reason if it failed. A replaced stage counts as failed."""
        try:
            stage = self._penstock_slot.staged(policy_version)
        except WeightPushFailed as error:
            return "failed", str(error)
        return stage.phase, stage.failure

    def penstock_mismatch(self, policy_version: int, bucket_checksums: list[str]) -> str:
        """Return why the stage must not be committed as this version, or an empty string if it may."""
        phase, failure = self.penstock_poll(policy_version)
        if phase != "received":
            return failure or f"version {policy_version} is still being received"
        return self._penstock_slot.staged(policy_version).mismatch(bucket_checksums)

    def penstock_commit(self) -> tuple[float, float]:
        """Load the stage into the serving model. Call it while nothing decodes. Returns receive_s and load_s."""
        stage = self._penstock_slot.take()
        started = time.monotonic()
        tensors = list(stage.tensors())
        copies = getattr(self, "_penstock_copies", None)
        if copies is not None and copies.fit(tensors):
            copies.load(tensors)
        else:
            self._penstock_reload(tensors)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._penstock_slot.loaded = stage
        return stage.receive_s, time.monotonic() - started

    def _penstock_reload(self, tensors: NamedTensors) -> None:
        """Load the tensors as vLLM does. The first time, learn whether later versions can simply be copied."""
        logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)
        model = self.model_runner.get_model()
        is_cpu = self.device.type == "cpu"
        with set_current_vllm_config(self.vllm_config):  # needed where a layer is quantized again
            if is_cpu:
                _forget_expert_kernels(model)
            reload(model, self.model_config, tensors)
            if is_cpu:
                _pack_tied_head(model, self.model_config.hf_text_config)
            if self.device.type in COPYING_DEVICES and not hasattr(self, "_penstock_copies"):
                # Whatever goes wrong here, vLLM's loader has just loaded the version and can load the next.
                self._penstock_copies = None
                try:
                    self._penstock_copies = learn(model, tensors)
                except NotPlain as reason:
                    logger.info("vLLM's loader loads every version: %s", reason)
                except Exception as error:
                    logger.warning("vLLM's loader loads every version, because learning its copies failed: %r", error)

    def penstock_abort(self) -> None:
        self._penstock_slot.abort()


def reload(model: Any, model_config: Any, tensors: NamedTensors) -> None:
    """Load the tensors into a model that serves, by vLLM's own loader."""
    initialize_layerwise_reload(model)
    model.load_weights(iter(tensors))
    finalize_layerwise_reload(model, model_config)


def _forget_expert_kernels(model: Any) -> None:
    """Let vLLM set up the kernels of experts again. On CPU they multiply with packed weights, which vLLM packs only
    when it sets up the kernel. A reload that keeps the kernel would fill the packed weights with plain ones."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_tied_head(model: Any, hf_config: Any) -> None:
    """Pack a tied head again. On CPU vLLM multiplies with packed copies of the weights, and a reload packs only the
    layers that it loads. A tied head is loaded through the embedding, so its copy would keep the old weights."""
    if getattr(hf_config, "tie_word_embeddings", False):
        model = model.get_language_model() if hasattr(model, "get_language_model") else model
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def flip(
    core: Any, policy_version: int, bucket_checksums: list[str], salt: str, clear_cache: bool
) -> Flipped | Future[Flipped]:
    """Load the staged version on all workers between two steps.

    Decoding would otherwise wait for a round trip between two busy processes at every stage of the flip: pause, load,
    set the version, resume. This call does everything at the first moment at which no step is in flight:
    - It refuses a stage that does not verify, before anything is paused.
    - Every token of the old version leaves before the scheduler answers the pause (`ChunkedOutputs`).
    - The version is set while no step is in flight. A mark among the outputs shows where its tokens begin.
    - Requests without a token begin under the new version, and share no KV with an earlier load.

    If the load fails, the scheduler stays paused and the call fails. `salt` is that of requests which the server
    submits under the new version. The pause is counted from here: steps in flight are finished, and no other begins."""
    workers = core.model_executor
    mismatches = workers.collective_rpc("penstock_mismatch", CONTROL_TIMEOUT_S, (policy_version, bucket_checksums))
    if found := next(filter(None, mismatches), ""):
        return found, 0.0, []
    started = time.monotonic()

    def load() -> Flipped:
        timings = workers.collective_rpc("penstock_commit", LOAD_TIMEOUT_S)
        begin_version(core, policy_version)
        core.scheduler.begin_load(salt)
        core.resume_scheduler()
        # EngineCore is about to wait for a message, because nothing could be scheduled until now.
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        return "", time.monotonic() - started, timings

    paused = core.pause_scheduler("keep", clear_cache)
    return load() if paused is None else _then(paused, load)


def begin_version(core: Any, policy_version: int) -> None:
    """Set the version of all tokens from now on. EngineCore calls it while no step is in flight."""
    mark = EngineCoreOutput(f"{VERSION_MARK}{policy_version}", [])
    core.output_queue.put_nowait((0, EngineCoreOutputs(outputs=[mark])))


def _then(paused: Future[None], load: Any) -> Future[Flipped]:
    """Call `load` when the pause is complete, in the thread that completes it."""
    flipped: Future[Flipped] = Future()

    def run(paused: Future[None]) -> None:
        try:
            paused.result()
            result = load()
        except Exception as error:  # the server gets it as the failure of its call
            flipped.set_exception(error)
        else:
            flipped.set_result(result)

    paused.add_done_callback(run)
    return flipped


def prepare_process() -> None:
    """Prepare EngineCore's process. vLLM creates the executor first, and then the scheduler."""
    from vllm.v1.engine.core import EngineCoreProc  # here: workers in separate processes need no EngineCore

    EngineCoreProc.penstock_flip = flip
    logging.getLogger(SCHEDULER_LOGGER).setLevel(logging.ERROR)
    end_with_parent(os.getppid(), lambda: os._exit(1))  # otherwise EngineCore would outlive a killed server


class InProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """Runs the worker in the EngineCore process: one child process instead of two, and half the start-up time."""

    def _init_executor(self) -> None:
        prepare_process()
        if "OMP_NUM_THREADS" in os.environ:
            # torch reads its variables when it is imported, which a forked process does not do.
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
            torch._dynamo.config.disable = True
        super()._init_executor()


class TensorParallelExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Runs one worker process per device. vLLM's own death pipe ends them with EngineCore."""

    def _init_executor(self) -> None:
        prepare_process()
        super()._init_executor()


# ── loading by copies ──

Kind = tuple[str, torch.dtype, torch.Size, tuple[int, ...]]
Place = tuple[dict[str, Any], str, int]
"""The parameters of a layer, the name of one, and where its memory begins."""

PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)
"""With these, values get into Python: a later version has others."""
KNOWN_TENSORS = ("_parameters", "_buffers", "_modules", "kv_cache")
"""Attributes of a layer whose tensors are its parameters and buffers, or not made from weights."""
COMPARED_ELEMENTS = 16 * 2**20
"""Elements that are compared at once. The comparison needs as many bytes."""


class NotPlain(Exception):
    """The model needs vLLM's loader. Says why."""


@dataclass(frozen=True)
class CopiedPart:
    """A part of a staged tensor, and the memory of a parameter that it belongs into."""

    index: int
    offset: int
    """In elements, from the beginning of the tensor."""
    size: torch.Size
    stride: tuple[int, ...]
    target: torch.Tensor

    def source(self, tensors: NamedTensors) -> torch.Tensor:
        tensor = tensors[self.index][1]
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Copies:
    """All parts of a version. `load` does what vLLM's loader does, for every version whose tensors are of the same
    kinds, as long as the parameters of the model stay where they are."""

    _kinds: list[Kind]
    _parts: list[CopiedPart]
    _places: list[Place]

    def fit(self, tensors: NamedTensors) -> bool:
        is_in_place = all(kept.get(name) is not None and kept[name].data_ptr() == at for kept, name, at in self._places)
        return is_in_place and kinds_of(tensors) == self._kinds

    @torch.no_grad()
    def load(self, tensors: NamedTensors) -> None:
        """Copies of one form are one call, which PyTorch makes few kernels of."""
        forms: dict[tuple[Any, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for part in self._parts:
            target, source = part.target, part.source(tensors)
            form = target.dtype, source.dtype, source.device, target.stride() == source.stride()
            forms[form][0].append(target)
            forms[form][1].append(source)
        for targets, sources in forms.values():
            torch._foreach_copy_(targets, sources)


def kinds_of(tensors: NamedTensors) -> list[Kind]:
    return [(name, tensor.dtype, tensor.shape, tensor.stride()) for name, tensor in tensors]


def learn(model: Any, tensors: NamedTensors) -> Copies:
    """Find the copies that load these tensors. Call it when vLLM's own reload has loaded them, and nothing decodes.
    Raises NotPlain if there is more to do, and changes nothing of the model in any case."""
    refuse_other_weights(model)
    with torch.no_grad(), _unchanged(model), _Recorder() as recorder:
        model.load_weights(iter(tensors))
    parts = list(_parts_of(recorder.copies, tensors))
    _refuse_gaps(model, [part.target for part in parts], recorder.fills)
    for part in parts:
        if _differ(part.target, part.source(tensors)):
            raise NotPlain(f"vLLM keeps other values of {tensors[part.index][0]}")
    places = [
        (module._parameters, name, parameter.data_ptr())
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    return Copies(kinds_of(tensors), parts, places)


def refuse_other_weights(model: Any) -> None:
    """Refuse layers that compute something from their weights when they are loaded."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not isinstance(method, PLAIN_METHODS):
            raise NotPlain(f"{name} has the method {type(method).__name__}")
        if isinstance(module, Attention) and _has_sinks(module.impl):
            raise NotPlain(f"{name} has sinks")
        if hasattr(module, "process_weights_after_loading") and not isinstance(module, Attention):
            raise NotPlain(f"{name} ({type(module).__name__}) prepares its weights")
        for attribute, value in vars(module).items():
            if attribute not in KNOWN_TENSORS and any(tensor.numel() > 1 for tensor in _tensors_in(value)):
                raise NotPlain(f"{name}.{attribute} is neither a parameter nor a buffer")


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensor, or the tensors in a container."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | set | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)


def _has_sinks(implementation: Any) -> bool:
    """Whether attention has sinks, of which some kernels keep a copy. An implementation may consist of several."""
    variants = getattr(implementation, "get_impl_variants", None)
    each: Iterable[Any] = variants() if variants is not None else (implementation,)
    return any(getattr(one, name, None) is not None for one in each for name in ("sinks", "_sinks_source"))


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Undo and refuse what a loader does besides writing to tensors: new parameters, other memory, other attributes."""
    memory = [(tensor, tensor.data, tensor.data_ptr()) for tensor in [*model.parameters(), *model.buffers()]]
    attributes = [
        (kept, dict(kept))
        for module in model.modules()
        for kept in (vars(module), module._parameters, module._buffers, module._modules)
    ]
    is_changed = False
    try:
        yield
    finally:
        for tensor, data, begin in memory:
            if tensor.data_ptr() != begin or tensor.dtype != data.dtype or tensor.stride() != data.stride():
                tensor.data, is_changed = data, True
        for kept, before in attributes:
            if kept.keys() != before.keys() or any(kept[name] is not value for name, value in before.items()):
                kept.clear()
                kept.update(before)
                is_changed = True
    if is_changed:
        raise NotPlain("its loader replaces something of a layer")


class _Recorder(TorchDispatchMode):
    """Records the copies and fills of a loader, and does not execute them. Other operations that write,
    and operations that read values, are refused."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.fills: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
            return args[0]
        if func in FILLS:
            self.fills.append(args[0])
            return args[0]
        if func in READS:
            raise NotPlain("its loader reads values")
        if func._schema.is_mutable:
            raise NotPlain(f"its loader calls {func}")
        return func(*args, **(kwargs or {}))


def _parts_of(copies: Iterable[tuple[torch.Tensor, torch.Tensor]], tensors: NamedTensors) -> Iterator[CopiedPart]:
    """The parts that were copied. A source is recognized by its address, because tensors are views into buckets."""
    begins = sorted((tensor.data_ptr(), index) for index, (_, tensor) in enumerate(tensors) if tensor.numel())
    for target, source in copies:
        at = bisect.bisect_right(begins, source.data_ptr(), key=lambda begin: begin[0]) - 1
        index = begins[at][1] if at >= 0 else 0
        tensor = tensors[index][1]
        offset, remainder = divmod(source.data_ptr() - tensor.data_ptr(), tensor.element_size())
        last = offset + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
        if at < 0 or remainder or last >= tensor.numel() or source.device != tensor.device:
            raise NotPlain("its loader computes what it copies")
        if source.dtype != tensor.dtype or source.shape != target.shape:
            raise NotPlain(f"its loader changes the form of {tensors[index][0]}")
        yield CopiedPart(index, offset, source.shape, source.stride(), target.detach())


def _refuse_gaps(model: Any, copied: list[torch.Tensor], filled: list[torch.Tensor]) -> None:
    """Refuse copies that omit an element of a parameter, or write an element of any tensor twice."""
    written: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for target in [*copied, *filled]:
        if not target.is_contiguous():
            raise NotPlain("its loader writes to memory with gaps")
        if target.numel():
            begin = target.data_ptr()
            written[_memory_of(target)].append((begin, begin + target.nbytes))
    for pieces in written.values():
        pieces.sort()
        if any(begin < end for (_, end), (begin, _) in itertools.pairwise(pieces)):
            raise NotPlain("its loader writes to the same memory twice")
    for name, parameter in model.named_parameters():
        begin = parameter.data_ptr()
        borders = [begin, *(border for piece in written[_memory_of(parameter)] for border in piece)]
        borders.append(begin + parameter.nbytes)
        if not parameter.is_contiguous() or borders[::2] != borders[1::2]:
            raise NotPlain(f"its loader skips a part of {name}")


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dim() == 0:
        return not torch.equal(one, other.to(one))
    num_rows = max(1, COMPARED_ELEMENTS * len(one) // max(one.numel(), 1))
    pieces = zip(one.split(num_rows), other.split(num_rows), strict=True)
    return any(not torch.equal(mine, theirs.to(mine)) for mine, theirs in pieces)


# ── vLLM's scheduler: chunks and salts ──

Row = tuple[float, int]
"""The log-prob and the rank of a sampled token."""


class StepRows:
    """Takes the place of a step's log-probs, of class LogprobsLists, in vLLM's loop over the requests."""

    __slots__ = ("_logprobs", "_ranks", "_table")

    def __init__(self, table: Any) -> None:
        self._table = table
        self._logprobs: list[float] = table.logprobs[:, 0].tolist()
        self._ranks: list[int] = table.sampled_token_ranks.tolist()

    def slice_request(self, index: int, num_tokens: int) -> Row | Any:
        """The row of the request at `index`. With several tokens, from speculation, it is vLLM's own slice."""
        if num_tokens != 1:
            return self._table.slice_request(index, num_tokens)
        starts = self._table.cu_num_generated_tokens
        row = index if starts is None else starts[index]
        return self._logprobs[row], self._ranks[row]


def as_lists(token_ids: list[int], rows: Sequence[Any], table: Any) -> Any:
    """The rows of the tokens, one after another in one list, as a LogprobsLists with the types of `table`."""
    return table._replace(
        logprob_token_ids=np.array(token_ids, table.logprob_token_ids.dtype)[:, None],
        logprobs=np.array(rows[0::2], table.logprobs.dtype)[:, None],
        sampled_token_ranks=np.array(rows[1::2], table.sampled_token_ranks.dtype),
        cu_num_generated_tokens=None,
    )


@dataclass(slots=True)
class Chunk:
    """The newest outputs of a request, until there are `size` tokens. Its log-probs are those of the sampled tokens."""

    size: int
    token_ids: list[int] = field(default_factory=list)
    _last: Any = None
    _rows: list[Any] = field(default_factory=list)
    _events: list[Any] = field(default_factory=list)
    _experts: list[Any] = field(default_factory=list)

    def add(self, output: Any) -> None:
        self._last = output
        self.token_ids += output.new_token_ids
        logprobs = output.new_logprobs
        if type(logprobs) is tuple:
            self._rows += logprobs
        elif logprobs is not None:
            for row in zip(logprobs.logprobs[:, 0].tolist(), logprobs.sampled_token_ranks.tolist(), strict=True):
                self._rows += row
        if output.events:
            self._events += output.events
        if output.routed_experts is not None:
            self._experts.append(output.routed_experts)

    def whole(self, table: Any) -> Any:
        """All outputs as one. `table` is as for `as_lists`."""
        whole = self._last
        whole.new_token_ids = self.token_ids
        whole.new_logprobs = as_lists(self.token_ids, self._rows, table) if self._rows else None
        whole.events = self._events or None
        whole.routed_experts = np.concatenate(self._experts) if self._experts else None
        return whole


class ChunkedOutputs:
    """Mixed into a scheduler class of vLLM."""

    requests: dict[str, Any]
    pause_state: PauseState

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._kept: dict[str, Chunk] = {}
        self._table: Any = None
        """The log-probs of the newest step that has some."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        table = model_runner_output.logprobs
        if table is not None:
            self._table = table
            if table.logprobs.shape[1] == 1:  # no request asks for other tokens than the sampled one
                model_runner_output.logprobs = StepRows(table)
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        for message in messages.values():
            message.outputs = [whole for output in message.outputs if (whole := self._add(output)) is not None]
        if self.pause_state != PauseState.UNPAUSED:
            for request_id, kept in self._kept.items():
                message = messages.setdefault(self.requests[request_id].client_index, EngineCoreOutputs())
                message.outputs.append(kept.whole(self._table))
            self._kept.clear()
        return messages

    def _add(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Return what is to be sent of the output's request now, or None."""
        kept = self._kept.get(output.request_id)
        if kept is None:
            size = self._chunk_tokens(output)
            if size == 1:
                if type(output.new_logprobs) is tuple:
                    output.new_logprobs = as_lists(output.new_token_ids, output.new_logprobs, self._table)
                return output
            kept = self._kept[output.request_id] = Chunk(size)
        kept.add(output)
        if output.finish_reason is None and len(kept.token_ids) < kept.size:
            return None
        del self._kept[output.request_id]
        return kept.whole(self._table)

    def _chunk_tokens(self, output: EngineCoreOutput) -> int:
        """How many tokens are sent together, from this output on. The first token is sent at once."""
        if output.finish_reason is not None or output.prefill_stats is not None:
            return 1
        settings = self.requests[output.request_id].sampling_params.extra_args or {}
        return int(settings.get(CHUNK_TOKENS, 1))

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        finished = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in finished:
            self._kept.pop(request.request_id, None)
        return finished

    def has_requests(self) -> bool:
        """True also for kept tokens of a paused scheduler: EngineCore takes one more step, which sends them."""
        is_paused = self.pause_state != PauseState.UNPAUSED
        return bool(super().has_requests() or (is_paused and self._kept))  # type: ignore[misc]


class SaltedRequests:
    """Mixed into a scheduler class of vLLM. A request never finds KV of another load than the one it starts under."""

    requests: dict[str, Any]
    running: list[Any]
    prev_step_scheduled_req_ids: set[str]
    _preempt_request: Any

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._salt: str | None = None

    def begin_load(self, salt: str) -> None:
        """Let the requests without a token start under the weights that were just loaded, whose salt this is. Call it
        while the scheduler is paused and no step is in flight."""
        self._salt = salt
        unstarted = [request for request in self.requests.values() if request.num_output_tokens == 0]
        for request in reversed(unstarted):  # vLLM puts each one at the front of its queue
            if request.status == RequestStatus.RUNNING:  # a part of its prompt was computed with the old weights
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
                self.prev_step_scheduled_req_ids.discard(request.request_id)
            _set_salt(request, salt)

    def add_request(self, request: Any) -> None:
        if self._salt is not None and request.cache_salt != self._salt:
            _set_salt(request, self._salt)  # it was submitted before the server heard of the load
        super().add_request(request)  # type: ignore[misc]


def _set_salt(request: Any, salt: str) -> None:
    """The hashes of all blocks depend on the salt, because each one depends on the one before."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()


class ChunkedScheduler(ChunkedOutputs, SaltedRequests, Scheduler):  # type: ignore[misc]
    """For synchronous scheduling."""


class ChunkedAsyncScheduler(ChunkedOutputs, SaltedRequests, AsyncScheduler):  # type: ignore[misc]
    """For asynchronous scheduling, vLLM's default."""
