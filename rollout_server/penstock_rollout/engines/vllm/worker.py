"""Code that runs inside vLLM's own processes: it stages weights in the workers and flips versions in EngineCore.

The processes end with the server.

vLLM loads it by name (`worker_extension_cls`, `distributed_executor_backend`). collective_rpc calls the methods between
two decode steps, so no method blocks. Arguments and results are plain values, never weights.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock_rollout.engines.child_process import end_with_parent
from penstock_rollout.engines.vllm.copies import Copies, NamedTensors, NotPlain, learn
from penstock_rollout.engines.vllm.start import CONTROL_TIMEOUT_S, LOAD_TIMEOUT_S, VERSION_MARK
from penstock_rollout.weights.stage import StageSlot, device_uuid

logger = logging.getLogger(__name__)

COPYING_DEVICES = ("cuda",)
"""Where vLLM multiplies with the parameters themselves. On a CPU it multiplies with packed copies of them."""
RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
"""This logger warns at every reload about layers that have no weights: rotary embeddings and tied heads."""
SCHEDULER_LOGGER = "vllm.config.scheduler"
"""This logger warns of every scheduler class that is not vLLM's own, ours too."""
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
    _penstock_slot: StageSlot
    _penstock_copies: Copies | None
    """Set at the first load. None if every version needs vLLM's loader."""

    def penstock_stage(self, announcement: bytes) -> None:
        """Start to receive the version of a serialized AnnounceRequest. Drops an earlier stage."""
        self._penstock_stages().begin(weights_pb2.AnnounceRequest.FromString(announcement))

    def penstock_device(self) -> str:
        """Return `cpu`, or the UUID of this worker's GPU."""
        return device_uuid(self.device)

    def penstock_poll(self, policy_version: int) -> tuple[str, str]:
        """Return the phase of the version's stage and the reason if it failed. A replaced stage counts as failed."""
        try:
            stage = self._penstock_stages().staged(policy_version)
        except WeightPushFailed as error:
            return "failed", str(error)
        return stage.phase, stage.failure

    def penstock_mismatch(self, policy_version: int, bucket_checksums: list[str]) -> str:
        """Return why the stage must not be committed as this version, or an empty string if it may."""
        phase, failure = self.penstock_poll(policy_version)
        if phase != "received":
            return failure or f"version {policy_version} is still being received"
        return self._penstock_stages().staged(policy_version).mismatch(bucket_checksums)

    def penstock_commit(self) -> tuple[float, float]:
        """Load the stage into the serving model. Call it while nothing decodes. Returns receive_s and load_s."""
        stage = self._penstock_stages().take()
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
        self._penstock_stages().abort()

    def _penstock_stages(self) -> StageSlot:
        if not hasattr(self, "_penstock_slot"):
            self._penstock_slot = StageSlot(Path(self.model_config.model), self.device, self.rank)
        return self._penstock_slot


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
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def flip(
    core: Any, policy_version: int, bucket_checksums: list[str], salt: str, clear_cache: bool
) -> Flipped | Future[Flipped]:
    """Load the staged version on all workers between two steps.

    Decoding would otherwise wait for a round trip between two busy processes at every stage of the flip: pause, load,
    set the version, resume. This call does everything at the first moment at which no step is in flight:
    - It refuses a stage that does not verify, before anything is paused.
    - Every token of the old version leaves before the scheduler answers the pause (scheduler.py).
    - The version is set while no step is in flight. A mark among the outputs shows where its tokens begin.
    - Requests without a token begin under the new version, and share no KV with an earlier load.

    If the load fails, the scheduler stays paused and the call fails. `salt` is that of requests which the server
    submits under the new version. The pause is counted from here: steps in flight are finished, and no other begins."""
    from vllm.v1.engine import EngineCoreRequestType

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
    """Set the version of all tokens from now on. EngineCore calls it while no step is in flight. vLLM's own stamps
    follow, where it has them."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    if hasattr(core, "set_weight_version"):
        core.set_weight_version(str(policy_version))
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
