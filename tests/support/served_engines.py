"""An engine that serves a tiny model, and the same model in plain Hugging Face to compare with."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import importlib.util
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from penstock.config.rollout import EngineConfig
from penstock.trajectory import Sampling, VersionSegment
from penstock.v1 import weights_pb2
from penstock.weights.transports import (
    XXH3_PIECES,
    TensorShape,
    build_manifest,
    group_places,
    host_checksum,
)
from penstock_learner.model.architectures import ModelPath
from penstock_learner.model.causal_lm import CausalLM
from penstock_learner.model.published_layout import PushedWeights
from penstock_rollout.engines.engine import Engine, EngineStats, GenerateRequest, TokenChunk, segments_of
from penstock_rollout.engines.factory import create_engine
from penstock_rollout.engines.sglang.engine import SglangEngine
from penstock_rollout.engines.torch.engine import TorchEngine
from penstock_rollout.engines.vllm import engine as vllm_engine
from penstock_rollout.engines.vllm.engine import VersionStamps
from penstock_rollout.engines.vllm.start import prepare_environment
from support.answers import Answer
from support.tiny_models import make_tiny_qwen2
from support.weight_buckets import packed_buckets

torch.set_num_threads(1)  # the models are tiny, and OpenMP threads would compete with the engine's

TOLERANCE = 1e-3
LONG = Sampling(max_tokens=400, ignore_eos=True)
"""Sampling of a request that is to be in flight for some time. Without `ignore_eos` most would end much earlier."""
MAX_MODEL_LEN = 512
DEADLINE_S = 60.0
"""For everything that is expected to succeed. On a busy machine even a small push takes seconds."""


def load_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def expected_log_probs(model: Any, answer: Answer, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor([answer.prompt + answer.token_ids])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(answer.prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]


def assert_log_probs(model: Any, answer: Answer, temperature: float = 1.0) -> None:
    expected = expected_log_probs(model, answer, temperature)
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=TOLERANCE, rtol=0)


@dataclass(frozen=True)
class Push:
    manifest: weights_pb2.WeightManifest
    buckets: list[NDArray[np.uint8]]

    @property
    def checksums(self) -> list[str]:
        return [host_checksum(XXH3_PIECES, bucket) for bucket in self.buckets]

    @classmethod
    def of(cls, model: Any, version: int) -> Push:
        """Pack the model's weights, as the learner gathers them, into small buckets, so that there are several."""
        gathered = PushedWeights(CausalLM(model, 16, ModelPath(""))).gathered()
        weights = {name: tensor.contiguous().numpy() for name, tensor in gathered}
        shapes = [TensorShape(name, "F32", array.shape) for name, array in weights.items()]
        manifest = build_manifest("run", version, 1, shapes, bucket_bytes=64 << 10)
        return cls(manifest, packed_buckets(manifest, weights))


GROUP_SIZE = 32


class Publisher:
    """Rank 0 of a gloo group with one member, in a thread."""

    def __init__(self, push: Push, num_buckets: int | None = None) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._push = push
        self._num_buckets = len(push.buckets) if num_buckets is None else num_buckets
        self._group: Any = None
        self._failure: RuntimeError | None = None
        """Why the group broke. A member that does not take part in the whole push breaks it."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def announcement(self, timeout_s: float = DEADLINE_S) -> weights_pb2.AnnounceRequest:
        rendezvous = f"127.0.0.1:{self._store.port}/push-{self._push.manifest.policy_version}/{GROUP_SIZE}"
        return weights_pb2.AnnounceRequest(
            manifest=self._push.manifest, transport="gloo", rendezvous=rendezvous, rank=1, world_size=2,
            deadline_s=timeout_s,
        )  # fmt: skip

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive() and self._failure is None, self._failure

    def _run(self) -> None:
        try:
            self._send()
        except RuntimeError as error:
            self._failure = error

    def _send(self) -> None:
        [place] = group_places(0, 2, GROUP_SIZE)
        prefix = f"push-{self._push.manifest.policy_version}/{place.name}"
        self._group = ProcessGroupGloo(PrefixStore(prefix, self._store), 0, 2, timedelta(seconds=DEADLINE_S))
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for bucket in self._push.buckets[: self._num_buckets]:
            self._group.broadcast([torch.from_numpy(bucket)], options).wait()


class Served:
    """An engine, and the model that it should serve."""

    def __init__(self, engine: Engine, model: Any) -> None:
        self.engine = engine
        self.model = model
        self._num_requests = 0

    async def answer(self, prompt: tuple[int, ...], sampling: Sampling, stream: bool = False) -> Answer:
        return Answer.of(prompt, [chunk async for chunk in self.chunks(prompt, sampling, stream)])

    def chunks(self, prompt: tuple[int, ...], sampling: Sampling, stream: bool = True) -> AsyncIterator[TokenChunk]:
        self._num_requests += 1
        return self.engine.generate(GenerateRequest(f"request-{self._num_requests}", prompt, sampling, stream))

    def next_model(self) -> Any:
        """Return a copy of the served model with perturbed weights."""
        model = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(self.engine.policy_version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
        return model

    async def update(self, model: Any, version: int | None = None) -> int:
        """Push the model by gloo and commit it, as the next version if none is given. Returns the version."""
        version = self.engine.policy_version + 1 if version is None else version
        push = Push.of(model, version)
        publisher = Publisher(push)
        await self.engine.stage_weights(publisher.announcement())
        publisher.start()
        started = time.monotonic()
        report = await self.engine.commit_weights(version, push.checksums, timeout_s=DEADLINE_S)
        assert 0 < report.load_s <= report.paused_s <= time.monotonic() - started
        publisher.join()
        assert report.receive_s > 0
        self.model = model
        return version

    async def check_serves(self, version: int) -> None:
        await self.engine.check_health()
        assert self.engine.policy_version == version
        answer = await self.answer((7, 8, 9), Sampling(max_tokens=8))
        assert set(answer.versions) == {version}
        assert_log_probs(self.model, answer)


async def hold_decoding(engine: Engine) -> None:
    """Stop decoding until the next commit, after which every engine goes on. Requests that come meanwhile wait."""
    if isinstance(engine, vllm_engine.VllmEngine):
        await engine._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
    elif isinstance(engine, SglangEngine):
        engine._open.clear()
        await engine._calls.pause("in_place")
    elif isinstance(engine, TorchEngine):
        _hold_thread(engine)


def _hold_thread(engine: TorchEngine) -> None:
    def run_the_next_actions() -> None:
        with engine._changed:
            engine._changed.wait_for(lambda: bool(engine._actions) or engine._stopping)
            actions = [engine._actions.popleft() for _ in range(len(engine._actions))]
        for action in actions:
            action()

    engine._change(lambda: engine._actions.append(run_the_next_actions))


async def until_submitted(engine: Engine, num_requests: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (stats := engine.stats()).running_requests + stats.waiting_requests < num_requests:
            await asyncio.sleep(0.005)


async def idle(served: Served) -> EngineStats:
    """The engine's stats once it has noticed that no request is left. A new request makes it update them."""
    async with asyncio.timeout(DEADLINE_S):
        while (stats := served.engine.stats()) != EngineStats(0, 0, 0.0):
            await served.answer((8,), Sampling(max_tokens=2))
            await asyncio.sleep(0.05)
    return stats


class ComparedStamps(VersionStamps):
    """Our stamps and those of vLLM 0.32 of the same tokens. Raises if they differ.

    vLLM keeps the spans of a request, and reports them with its last output."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._processor = llm.output_processor

    def segments(self, request_id: str, completion: Any, start: int) -> tuple[VersionSegment, ...]:
        own = super().segments(request_id, completion, start)
        if completion.finish_reason is None:
            (internal_id,) = self._processor.external_req_ids[request_id]
            starts = self._processor.request_states[internal_id].weight_version_starts
        else:
            starts = [(span.version, span.start) for span in completion.weight_versions or ()]
        end = start + len(completion.token_ids)
        assert own == segments_of([(int(version), first) for version, first in starts], start, end)
        return own


def _reports_versions() -> bool:
    from vllm.outputs import CompletionOutput

    return "weight_versions" in {field.name for field in dataclasses.fields(CompletionOutput)}


def _let_vllm_stamp(patch: pytest.MonkeyPatch) -> None:
    """Have EngineCore, which is forked from this process, also tell vLLM when a version begins."""
    prepare_environment()
    from penstock_rollout.engines.vllm import core as vllm_core

    begin_version = vllm_core.begin_version

    def stamp(core: Any, policy_version: int) -> None:
        core.set_weight_version(str(policy_version))
        begin_version(core, policy_version)

    patch.setattr(vllm_core, "begin_version", stamp)


def make_engine(config: EngineConfig, folder: Path, *, report_experts: bool = False) -> Engine:
    """Create an engine. SGLang has no CPU build, so a stand-in with the same model speaks its protocol."""
    if config.name == "sglang":
        return SglangEngine(config, folder, "float32", seed=0, module="support.sglang.stand_in")
    return create_engine(config, folder, "float32", seed=0, report_experts=report_experts)


def write_qwen2(folder: Path) -> None:
    make_tiny_qwen2(folder, seed=0)


async def start_engine(
    kind: str,
    folder: Path,
    keep_kv_cache: bool = True,
    write_model: Callable[[Path], None] = write_qwen2,
    report_experts: bool = False,
) -> Served:
    """Start an engine of the given kind on the model that `write_model` writes to the folder.

    `vllm-compared-stamps` also checks vLLM's own version stamps, which releases before 0.32 do not have.
    `vllm-parallel` has two workers."""
    if kind != "torch" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    if "-stamps" in kind and not _reports_versions():
        pytest.skip("this vllm does not say which version made a token")
    write_model(folder)
    name: Any = kind.partition("-")[0]
    config = EngineConfig(
        name=name, max_model_len=MAX_MODEL_LEN, max_num_seqs=64, keep_kv_cache=keep_kv_cache,
        tensor_parallel_size=2 if kind == "vllm-parallel" else 1,
    )  # fmt: skip
    engine = make_engine(config, folder, report_experts=report_experts)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "vllm-compared-stamps":
            patch.setattr(vllm_engine, "VersionStamps", ComparedStamps)
            _let_vllm_stamp(patch)
        await engine.start(policy_version=5)
    if kind == "vllm-compared-stamps":
        assert isinstance(engine, vllm_engine.VllmEngine)
        await engine._llm.engine_core.set_weight_version_async("5")
    return Served(engine, load_model(folder))
