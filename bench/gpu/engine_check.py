"""Checks an engine on a GPU: its log-probs against transformers, and its version stamps across updates in flight.

    PYTHONPATH=.:rollout_server:bench python bench/gpu/engine_check.py --engine vllm

It needs a GPU, torch, transformers and the engine, but neither Redis nor Ray. A random model with the shape of
Qwen2-0.5B is served in bf16, once with the KV cache kept through updates and once with it recomputed. There are two
updates, because an engine may load later versions in another way than the first: vLLM's worker copies them on a GPU.
The reference is a float32 forward pass over the same bf16 weights. Errors are judged relative to the error of
transformers' own bf16 forward pass. `--tiny` uses a small model and also runs on a CPU. `--composite gemma3` makes
it a composite one, whose updates have only the language model's tensors. SGLang's wheels are built for CUDA.
On a CPU it needs SGLANG_USE_CPU_ENGINE=1, a libcuda.so.1 to link to, and these flags:

    --engine sglang --tiny --extra '{"device": "cpu", "attention_backend": "torch_native", "max_total_tokens": 65536,
        "enable_deterministic_inference": false}'
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import SMOKE, Bar, Measurement, make_parser, report, report_skipped, say, sized
from penstock.config.rollout import EngineConfig
from penstock.trajectory import Sampling
from penstock.v1 import weights_pb2
from penstock.weights.folder_tensors import has_other_parts, tensor_shapes
from penstock.weights.snapshot import write_snapshot
from penstock.weights.transports import XXH3_PIECES, TensorShape, build_manifest, host_checksum
from penstock_rollout.engines.engine import Engine, GenerateRequest, TokenChunk
from penstock_rollout.engines.factory import create_engine
from penstock_rollout.engines.sglang.server import honours_seeds
from support.answers import Answer
from support.tiny_architectures import COMPOSITES, tiny_config
from support.tiny_models import write_tokenizer

DEADLINE_S = 400.0
NUM_REQUESTS = sized(64, 2)
BUCKET_BYTES = 256 << 20
OLD, NEW, NEWEST = 3, 4, 5
MIN_DIFFERENCE = 6
"""A token shows its version if its log-probs under the two versions differ by more than this many mean errors."""
SHARPER = 3.0
"""The new version's logits are this many times larger. Then most tokens show their version, even in 8 bits."""
LESS_SHARP = 1.5
"""The same of the newest version."""
DELTA_NETS = ("qwen3_5", "qwen3_5_moe")
"""Composite types with recurrent layers. Their heads and rotary embedding are as published."""
SECOND = "second update: "

Update = tuple[weights_pb2.AnnounceRequest, list[str]]
"""An announcement and its checksums."""


@dataclass(frozen=True)
class Size:
    """The size of the model and of the requests."""

    hidden: int = 896
    layers: int = 24
    heads: int = 14
    intermediate: int = 4864
    vocab: int = 151_936
    short: int = 128
    long: int = 768

    def config(self, composite: str) -> Any:
        """The config of a Qwen2, or of a composite model with a language model of this size and tiny other parts."""
        from transformers import Qwen2Config

        sizes: dict[str, Any] = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "initializer_range": 0.04,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        if not composite:
            return Qwen2Config(**sizes)
        head_dim = self.hidden // self.heads
        is_delta_net = composite in DELTA_NETS
        half = head_dim // (8 if is_delta_net else 2)
        sections = [half - 2 * (half // 3), half // 3, half // 3]
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
        if is_delta_net:
            sizes |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
            sizes["rope_parameters"] = rope | {"partial_rotary_factor": 0.25, "mrope_interleaved": True}
        elif "rope_parameters" in COMPOSITES[composite].get("text_config", {}):
            sizes["rope_parameters"] = rope
        config = tiny_config(composite, **sizes, head_dim=head_dim, sliding_window=512)
        config.tie_word_embeddings = True
        return config


TINY = Size(
    hidden=128, layers=4, heads=4, intermediate=256, vocab=512, short=sized(32, 4), long=sized(400, 40)
)  # fmt: skip


@dataclass
class Policy:
    """One version: its weights in bf16, and the same weights in float32 as the reference."""

    bf16: Any
    f32: Any

    @classmethod
    def load(cls, folder: Path, device: str) -> Policy:
        """Load both models from the folder. A cast would round the rotary frequencies too."""
        from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

        kind = AutoModelForMultimodalLM if has_other_parts(folder) else AutoModelForCausalLM

        def load(dtype: str) -> Any:
            return kind.from_pretrained(folder, dtype=dtype).to(device).eval()

        return cls(load("bfloat16"), load("float32"))

    def log_probs(self, answer: Answer, exact: bool = True) -> Any:
        """Log-probs of the answer's tokens, teacher-forced."""
        import torch

        model = self.f32 if exact else self.bf16
        device = next(model.parameters()).device
        ids = torch.tensor([answer.prompt + answer.token_ids], device=device)
        with torch.inference_mode():
            logits = model(ids).logits[0, len(answer.prompt) - 1 : -1].float()
            return logits.log_softmax(-1).gather(1, ids[0, len(answer.prompt) :, None])[:, 0].cpu()


def num_old(answer: Answer) -> int:
    return answer.versions.count(OLD)


@dataclass
class Errors:
    """Errors of log-probs relative to the reference: `ours` of the engine, `theirs` of transformers in bf16."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def add(self, policy: Policy, answer: Answer, start: int, end: int) -> None:
        import torch

        exact = policy.log_probs(answer)[start:end]
        self.ours += (torch.tensor(answer.log_probs[start:end]) - exact).abs().tolist()
        self.theirs += (policy.log_probs(answer, exact=False)[start:end] - exact).abs().tolist()

    @property
    def mean(self) -> float:
        return sum(self.ours) / len(self.ours)

    @property
    def ratio(self) -> float:
        return self.mean / (sum(self.theirs) / len(self.theirs))

    def __str__(self) -> str:
        theirs = f"transformers in bf16 {sum(self.theirs) / len(self.theirs):.5f}, max {max(self.theirs):.4f}"
        return f"{len(self.ours)} tokens: mean {self.mean:.5f}, max {max(self.ours):.4f} ({theirs})"


def make_policies(size: Size, folder: Path, device: str, composite: str) -> list[Policy]:
    """Write versions whose log-probs differ clearly to `folder/old`, `folder/new` and `folder/newest`. They differ in
    every tensor."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    torch.manual_seed(0)
    kind, config = AutoModelForMultimodalLM if composite else AutoModelForCausalLM, size.config(composite)
    with torch.device(device):
        models = {name: kind.from_config(config, dtype=torch.float32) for name in ("old", "new", "newest")}
    with torch.no_grad():
        for name, base in models["old"].named_parameters():
            if base.dim() == 1:
                base.add_(torch.randn_like(base), alpha=0.05)
            for later in (models["new"], models["newest"]):
                parameter = later.get_parameter(name)
                if base.dim() == 1:
                    parameter.copy_(base + 0.05 * torch.randn_like(base))
                else:
                    parameter.mul_(0.5).add_(base)
        for name, factor in (("new", SHARPER), ("newest", LESS_SHARP)):
            norm = decoder_norm(models[name])
            added = round(float(1 - norm.mean()))  # some norms multiply by 1 + weight
            norm.add_(added).mul_(factor).sub_(added)
    for name, model in models.items():
        model.bfloat16().save_pretrained(folder / name)
        write_tokenizer(folder / name, size.vocab)
    return [Policy.load(folder / name, device) for name in models]


def decoder_norm(model: Any) -> Any:
    decoder = model.get_decoder() if hasattr(model.config, "text_config") else model
    return getattr(decoder, "model", decoder).norm.weight  # Llama 4's decoder is a causal model


def write_update(model: Path, version: int, folder: Path) -> Update:
    import numpy as np
    import torch
    from safetensors.torch import load_file

    stored = load_file(model / "model.safetensors")
    weights = {name: stored[name] for name in tensor_shapes(model)}
    shapes = [TensorShape(name, "BF16", tuple(tensor.shape)) for name, tensor in weights.items()]
    manifest = build_manifest("engine-check", version, 1, shapes, BUCKET_BYTES)
    buckets = [np.zeros(bucket.num_bytes, dtype=np.uint8) for bucket in manifest.buckets]
    for spec in manifest.tensors:
        raw = weights[spec.name].contiguous().view(torch.uint8).numpy().reshape(-1)
        np.copyto(buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes], raw)
    checksums = [host_checksum(XXH3_PIECES, bucket) for bucket in buckets]
    write_snapshot(folder, manifest, buckets, checksums)
    announcement = weights_pb2.AnnounceRequest(
        manifest=manifest, transport="snapshot", rendezvous=str(folder), rank=0, world_size=1, deadline_s=60.0
    )
    return announcement, checksums


class Client:
    """Sends requests to an engine and keeps the replies."""

    def __init__(self, engine: Engine, size: Size, seeded: bool) -> None:
        self._engine = engine
        self._size = size
        self._seeded = seeded
        self._num_requests = 0

    async def answers(self, max_tokens: int, decoding: asyncio.Event | None = None) -> list[Answer]:
        """Generate answers, half of them streamed. `decoding` is set when the first streamed one has an eighth of its
        tokens."""
        words = self._size.vocab - 2
        prompts = [tuple(2 + (17 * i + j * j) % words for j in range(8 + i)) for i in range(NUM_REQUESTS)]
        sent = (self._answer(index, prompt, max_tokens, decoding) for index, prompt in enumerate(prompts))
        return await asyncio.gather(*sent)

    async def _answer(
        self, index: int, prompt: tuple[int, ...], max_tokens: int, decoding: asyncio.Event | None
    ) -> Answer:
        self._num_requests += 1
        sampling = Sampling(max_tokens=max_tokens, seed=index if self._seeded else None)
        request = GenerateRequest(f"request-{self._num_requests}", prompt, sampling, stream=index % 2 == 0)
        chunks: list[TokenChunk] = []
        arrivals: list[float] = []
        async for chunk in self._engine.generate(request):
            chunks.append(chunk)
            arrivals += [time.monotonic()] * len(chunk.token_ids)
            if decoding is not None and len(chunks) > max_tokens // 8:
                decoding.set()
        return replace(Answer.of(prompt, chunks), arrivals=tuple(arrivals))


class Check:
    """One engine from start to stop."""

    def __init__(self, mode: str, arguments: argparse.Namespace, size: Size, policies: list[Policy]) -> None:
        self.mode = mode
        self.measurements: list[Measurement] = []
        self.bars: list[Bar] = []
        self._arguments = arguments
        self._size = size
        self._old, self._new, self._newest = policies

    async def run(self, model: Path, first: Update, second: Update) -> None:
        config = EngineConfig(
            name=self._arguments.engine,
            max_model_len=1024,
            max_num_seqs=NUM_REQUESTS,
            gpu_memory_utilization=0.3,
            enforce_eager=not self._arguments.graphs,
            quantization=self._arguments.quantization,
            keep_kv_cache=self.mode == "keep",
            kv_cache_bytes=256 << 20,
            extra=self._arguments.extra,
        )
        engine = create_engine(config, model, "bfloat16", seed=0)
        client = Client(engine, self._size, seeded=config.name != "sglang" or honours_seeds(config))
        self._say("starting the engine")
        await engine.start(OLD)
        self._say("the engine is ready")
        try:
            before = await self._before(client)
            self._judge_update(await self._update(engine, client, first), before)
            await self._after(client, self._new, NEW, before)
            await self._update(engine, client, second, SECOND)
            await self._after(client, self._newest, NEWEST, before, SECOND)
        finally:
            await engine.stop()
            self._say("stopped")

    async def _before(self, client: Client) -> Errors:
        await client.answers(8)
        started = time.monotonic()
        answers = await client.answers(self._size.short)
        self._measure("decoding", "tokens/s", sum(len(a.token_ids) for a in answers) / (time.monotonic() - started))
        self._bar("tokens not stamped with the version that served", sum(_stamped_other(answers, OLD)), 0, True)
        errors = Errors()
        for answer in answers:
            errors.add(self._old, answer, 0, len(answer.token_ids))
        self._say(f"log-probs before the update, {errors}")
        if self._arguments.quantization is None:
            self._bar("log-prob error / error of transformers in bf16", errors.ratio, 2, True)
        return errors

    async def _update(self, engine: Engine, client: Client, update: Update, which: str = "") -> list[Answer]:
        """Update while requests decode. Returns their answers."""
        announcement, checksums = update
        decoding = asyncio.Event()
        running = asyncio.ensure_future(client.answers(self._size.long, decoding))
        await asyncio.wait_for(decoding.wait(), 60)
        self._say(f"{NUM_REQUESTS} requests decode; updating")
        await engine.stage_weights(announcement)
        commit = await engine.commit_weights(announcement.manifest.policy_version, checksums, timeout_s=60)
        self._measure(f"{which}receiving while decoding", "ms", 1000 * commit.receive_s)
        self._measure(f"{which}loading", "ms", 1000 * commit.load_s)
        self._measure(f"{which}paused", "ms", 1000 * commit.paused_s)
        answers = await running
        disordered = sum(list(answer.versions) != sorted(answer.versions) for answer in answers)
        self._bar(f"{which}answers whose versions go back", disordered, 0, True)
        return answers

    def _judge_update(self, answers: list[Answer], before: Errors) -> None:
        spanning = [answer for answer in answers if 0 < num_old(answer) < len(answer.versions)]
        gaps = [answer.arrivals[num_old(answer)] - answer.arrivals[num_old(answer) - 1] for answer in spanning]
        self._measure("longest gap between two tokens at the flip", "ms", 1000 * max(gaps, default=0.0))
        self._bar("requests that ran through the update", len(spanning), NUM_REQUESTS / 2)
        if not spanning:
            return
        old, new = Errors(), Errors()
        for answer in spanning:
            old.add(self._old, answer, 0, num_old(answer))
            new.add(self._new, answer, num_old(answer), len(answer.versions))
        self._say(f"log-probs of tokens stamped old, {old}")
        self._bar("error of tokens stamped old / error before the update", old.ratio / before.ratio, 1.5, True)
        self._say(f"log-probs of tokens stamped new, {new}")
        if self.mode == "recompute":
            self._bar("error of tokens stamped new / error before the update", new.ratio / before.ratio, 1.5, True)
        judged, wrong = self._judge_flip(spanning, old.mean, new.mean)
        self._bar("tokens at the flip whose log-prob shows their version", judged, len(spanning) / 4)
        self._bar("tokens at the flip with a wrong stamp", wrong, 0, True)

    def _judge_flip(self, spanning: list[Answer], old_error: float, new_error: float) -> tuple[int, int]:
        """Check the tokens around the flip. The last token stamped old must be nearer to the old version than to the
        new one. With recomputed KV, the first token stamped new must be nearer to the new one; with kept KV it belongs
        to neither alone. Returns how many of these tokens show their version, and how many of those are wrong."""
        judged = wrong = 0
        for answer in spanning:
            old, new = self._old.log_probs(answer), self._new.log_probs(answer)
            stamps = [(num_old(answer) - 1, old, new, old_error)]
            if self.mode == "recompute":
                stamps.append((num_old(answer), new, old, new_error))
            for index, stamped, other, error in stamps:
                if abs(stamped[index] - other[index]) > MIN_DIFFERENCE * error:
                    judged += 1
                    found = answer.log_probs[index]
                    wrong += bool(abs(found - stamped[index]) > abs(found - other[index]))
        return judged, wrong

    async def _after(self, client: Client, policy: Policy, version: int, before: Errors, which: str = "") -> None:
        answers = await client.answers(self._size.short)
        self._bar(f"{which}tokens after the update not stamped new", sum(_stamped_other(answers, version)), 0, True)
        errors = Errors()
        for answer in answers:
            errors.add(policy, answer, 0, len(answer.token_ids))
        self._say(f"{which}log-probs after the update, {errors}")
        self._bar(f"{which}error after the update / error before", errors.ratio / before.ratio, 1.5, True)

    def _say(self, text: str) -> None:
        say(f"{self.mode}: {text}")

    def _measure(self, name: str, unit: str, value: float) -> None:
        self.measurements.append(Measurement(f"{self.mode}: {name}", unit, [value]))
        self._say(f"{name}: {value:,.1f} {unit}")

    def _bar(self, name: str, value: float, goal: float, at_most: bool = False) -> None:
        self.bars.append(Bar(f"{self.mode}: {name}", value, goal, at_most))


def _stamped_other(answers: list[Answer], version: int) -> Iterator[int]:
    return (stamp != version for answer in answers for stamp in answer.versions)


async def check_all(arguments: argparse.Namespace, folder: Path, checks: list[Check]) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    size = TINY if arguments.tiny else Size()
    say(f"making three versions of the model on {name}")
    policies = make_policies(size, folder, device, arguments.composite)
    first, second = (
        write_update(folder / name, version, folder / f"update-{name}")
        for name, version in (("new", NEW), ("newest", NEWEST))
    )
    say(f"{sum(bucket.num_bytes for bucket in first[0].manifest.buckets) / 1e6:,.0f} MB of weights are written, twice")
    for mode in arguments.modes.split(","):
        checks.append(Check(mode, arguments, size, policies))
        await checks[-1].run(folder / "old", first, second)


def engine_version(name: str) -> str:
    for distribution in (name, f"{name}-cpu"):
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return name


async def main_async(arguments: argparse.Namespace) -> int:
    checks: list[Check] = []
    failure = ""
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await check_all(arguments, Path(folder), checks)
        except TimeoutError:
            failure = f"it did not end within {DEADLINE_S:.0f} s"
        except Exception as error:
            traceback.print_exc(limit=3, chain=False)
            failure = f"{type(error).__name__}: {error}"
    bars = [bar for check in checks for bar in check.bars]
    bars.append(Bar("checks that did not end", float(bool(failure)), 0, True))
    numbers = arguments.quantization or "bf16"
    title = f"the engine, {engine_version(arguments.engine)}, {arguments.composite or 'qwen2'}, {numbers}"
    parts = ["engine_check", *([arguments.engine] if arguments.engine != "vllm" else []), arguments.composite, numbers]
    name = "_".join(part for part in parts if part)
    ok = report(name, title, [m for check in checks for m in check.measurements], bars)
    say(failure or "done")
    return 0 if ok else 1


def main() -> None:
    parser = make_parser()
    parser.add_argument("--engine", choices=["vllm", "sglang", "torch"], default=sized("vllm", "torch"))
    parser.add_argument("--extra", type=json.loads, default={}, help="additional arguments of the engine, as JSON")
    parser.add_argument("--composite", choices=sorted(COMPOSITES), default="", help="the language model of this type")
    parser.add_argument("--tiny", action="store_true", default=SMOKE, help="use a small model")
    parser.add_argument(
        "--graphs", action="store_true", help="use CUDA graphs and torch.compile, which are slower to start"
    )
    parser.add_argument("--quantization", choices=["fp8"], help="quantize in the engine")
    parser.add_argument(
        "--modes", default=sized("keep,recompute", "recompute"), help="keep, recompute, or both, separated by a comma"
    )
    arguments = parser.parse_args()
    if SMOKE:
        report_skipped("vLLM and SGLang", "they need a GPU or take long to start; the torch engine is in their place")
    code = asyncio.run(main_async(arguments))
    os._exit(code)  # a start that hangs in its thread would keep the interpreter alive; the engine ends with its parent


if __name__ == "__main__":
    main()
