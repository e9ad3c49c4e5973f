"""Compares a training step of a Qwen3.5-shaped model with its padded path and with a dense model of its size.

    PYTHONPATH=.:learner:bench:tests python bench/gpu/hybrid.py [--models exact,2b] [--no-compile]

Three quarters of the layers are gated delta nets. `exact` checks that packed sequences, with flash-linear-attention
where it is installed, give the log-probs and gradients of each sequence alone: errors are relative to float32, and to
those of Hugging Face's forward in bfloat16. Mamba-2, short convolutions and RG-LRU are checked in small models, too.
MFU is relative to the speed of a large bfloat16 product in the same run. The work of a recurrence is that of one token
after the other: reading, correcting and writing a state take 6 FLOPs per number of it, three times that with the
backward pass. What chunks compute besides does not count. `--models tiny` runs on any machine, to try the script.
"""

from __future__ import annotations

import inspect
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness import Results, run_models, save, say, sized
from learner_parts.models import Setting, Shape

NAME = "hybrid"
TIMEOUTS_S = {"tiny": 300.0, "exact": 400.0, "2b": 300.0}
NUM_STEPS = sized(3, 1)
LENGTHS = sized((1, 700, 64, 3, 1, 129, 2), (1, 70, 3, 2))
"""The checked sequences are shorter than a convolution, as long as a chunk, and longer."""


@dataclass(frozen=True)
class Hybrid(Shape):
    """The sizes of a Qwen3.5 model. Every fourth layer has attention, with heads of 256 and a gate."""

    linear_heads: int = 16
    linear_dim: int = 128

    @property
    def head_dim(self) -> int:
        return 2 * self.linear_dim

    @property
    def num_attention(self) -> int:
        return self.layers // 4

    @property
    def matmul_weights(self) -> int:
        attention = self.hidden * self.head_dim * (3 * self.heads + 2 * self.key_heads)
        linear = self.hidden * (5 * self.linear_heads * self.linear_dim + 2 * self.linear_heads)
        mixers = self.num_attention * attention + (self.layers - self.num_attention) * linear
        return mixers + self.layers * 3 * self.hidden * self.intermediate + self.vocabulary * self.hidden

    def flops_per_token(self, length: float) -> float:
        attention = 6 * self.num_attention * self.heads * self.head_dim * length
        convolved = 3 * self.linear_heads * self.linear_dim
        recurrence = 3 * (6 * self.linear_heads * self.linear_dim**2 + 8 * convolved)
        return 6 * self.matmul_weights + attention + (self.layers - self.num_attention) * recurrence

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(
            "qwen3_5_text", vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.key_heads,
            head_dim=self.head_dim, linear_num_key_heads=self.linear_heads, linear_num_value_heads=self.linear_heads,
            linear_key_head_dim=self.linear_dim, linear_value_head_dim=self.linear_dim, tie_word_embeddings=self.tied,
            max_position_embeddings=32768, pad_token_id=None,
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * self.num_attention,
        )  # fmt: skip


SETTING = Setting(0.0, 16384)
HYBRID = {
    "tiny": Hybrid(64, 128, 4, 2, 1, 512, True, 2, *sized((64, 8), (4, 2)), linear_heads=2, linear_dim=16),
    "2b": Hybrid(2048, 6144, 24, 8, 2, 248320, True, 4),
}
DENSE = {
    "tiny": Shape(64, 128, 4, 2, 1, 512, True, 2, *sized((64, 8), (4, 2))),
    "2b": Shape(2048, 7168, 24, 16, 8, 248320, True, 4),
}
"""With as many weights in products, the same width and vocabulary."""


def bench_model(name: str, compiled: bool) -> Results:
    import torch
    import torch.distributed as dist

    from learner_parts.steps import clear, matmul_flops, start_only_rank
    from penstock_learner.model import recurrent_layers
    from penstock_learner.model.torch_settings import set_up_torch

    set_up_torch(torch.get_num_threads(), compiles=True)
    device = start_only_rank()
    results, peak = Results(), matmul_flops(device)
    if device.type == "cuda" and (missing := recurrent_layers.missing_kernels()):
        say(f"no kernels, plain PyTorch is measured: {missing} is not installed")
    results.add("large bfloat16 product", "TFLOP/s", peak / 1e12)
    for model_type, config in _small_configs(device.type == "cuda").items() if name != "2b" else ():
        _check(model_type, config, device, results)
        save(results)
        clear(device)
    if name != "exact":
        _compare_steps(HYBRID[name], DENSE[name], compiled, device, results, peak)
    save(results)
    dist.destroy_process_group()
    return results


def _compare_steps(shape: Hybrid, dense: Shape, compiled: bool, device: Any, results: Results, peak: float) -> None:
    from learner_parts.steps import make_batch

    batches = {
        "equal lengths": make_batch(shape.uniform(), shape.vocabulary),
        "mixed lengths": make_batch(shape.mixed(), shape.vocabulary),
    }
    measure = partial(_measure, batches=batches, device=device, results=results, peak=peak)
    packed = measure("packed", shape, compiled=compiled)
    of_dense = measure("dense", dense, compiled=compiled)
    padded = measure("padded", shape, compiled=False, padded=True)
    with _without_kernels():
        plain = measure("padded, without kernels", shape, compiled=False, padded=True)
    share = packed["equal lengths"] * shape.flops_per_token(shape.length)
    share /= of_dense["equal lengths"] * dense.flops_per_token(shape.length)
    results.add("packed / padded, both with kernels", "×", packed["mixed lengths"] / padded["mixed lengths"])
    times = packed["mixed lengths"] / plain["mixed lengths"]
    if device.type == "cuda":
        results.bar("MFU / dense", share, 0.85)
        results.bar("mixed lengths / padded path without kernels", times, 3.0)
    else:
        results.add("MFU / dense", "×", share)
        results.add("mixed lengths / padded path without kernels", "×", times)


def _measure(
    label: str, shape: Shape, *, batches: dict[str, Any], device: Any, results: Results, peak: float, compiled: bool,
    padded: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Median tokens per second by batch. The padded path recomputes its layers: its plain recurrences need memory."""
    from learner_parts.steps import Ours, clear, time_steps

    started = time.time()
    setting = Setting(1.0, SETTING.tokens) if padded else SETTING
    contender = Ours(shape, device, "bfloat16", setting, compiled, padded=padded)
    if compiled:
        contender.step(batches["mixed lengths"])  # compile the layers for any length now, not while they are timed
        say(f"{label}: ready after {time.time() - started:.0f} s")
    rates = {}
    for name, batch in batches.items():
        found = time_steps(contender, batch, 1 if padded else NUM_STEPS, device)
        results.add(f"{label}, {name}", "tokens/s", *found)
        rates[name] = statistics.median(found)
        lengths = batch.lengths
        flops = sum(float(shape.flops_per_token(length)) * length for length in lengths.tolist()) / lengths.sum()
        results.add(f"{label}, {name}, MFU", "of the product", rates[name] * flops / peak)
        save(results)
    del contender
    clear(device)
    return rates


@contextmanager
def _without_kernels() -> Iterator[None]:
    """Hugging Face's forward as it is where flash-linear-attention and causal-conv1d are not installed."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    names = [name for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn") if hasattr(modeling, name)]
    kept = {name: getattr(modeling, name) for name in names}
    for name, function in kept.items():
        setattr(modeling, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(modeling, name, function)


# ── packed sequences against each sequence alone ──


def _small_configs(is_cuda: bool) -> dict[str, Any]:
    """A small model of each kind of recurrent layer. On a GPU heads have the sizes that kernels are made for."""
    from support.tiny_architectures import tiny_config

    larger = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64} if is_cuda else {}
    delta = {"linear_key_head_dim": 128, "linear_value_head_dim": 128} if is_cuda else {}
    state = {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_heads": 16} if is_cuda else {}
    long = {"max_position_embeddings": 4096, "pad_token_id": None}
    return {
        "qwen3_5_text": tiny_config("qwen3_5_text", **larger, **delta, **long),
        "bamba": tiny_config("bamba, attention", **larger, **state, **long),
        "lfm2": tiny_config("lfm2, convolutions", **larger, **long),
        "recurrent_gemma": tiny_config("recurrent_gemma", **larger, **long, lru_width=larger.get("hidden_size", 32)),
    }


def _check(model_type: str, config: Any, device: Any, results: Results) -> None:
    """Compare the errors of packed bfloat16 with those of Hugging Face's own forward of each sequence in bfloat16."""
    import torch

    from penstock_learner.model.attention import packed_attention
    from penstock_learner.model.attention.packed_attention import mark_layers
    from penstock_learner.model.recurrent_layers import pack_recurrent_layers

    def model(dtype: Any, implementation: str) -> Any:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation)
        pack_recurrent_layers(made)
        mark_layers(made)
        return made.to(device, dtype)

    packed_attention.register()
    token_ids = torch.randint(0, config.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    token_ids = token_ids.to(device)
    alone = [[length] for length in LENGTHS]
    exact = _run(model(torch.float32, packed_attention.NAME), token_ids, alone, packed=True)
    plain = _run(model(torch.bfloat16, "eager"), token_ids, alone, packed=False)
    found = _run(model(torch.bfloat16, packed_attention.NAME), token_ids, [list(LENGTHS)], packed=True)
    errors = [[float((a - b).norm() / b.norm()) for a, b in zip(run, exact, strict=True)] for run in (plain, found)]
    for index, what in enumerate(("hidden states", "gradients")):
        ours, theirs = errors[1][index], errors[0][index]
        results.add(f"{model_type}, error of {what}, plain alone", "relative", theirs)
        results.add(f"{model_type}, error of {what}, packed", "relative", ours)
        if device.type == "cuda":
            results.bar(f"{model_type}, error of {what} / plain alone", ours / theirs, 1.5, at_most=True)


def _run(lm: Any, token_ids: Any, rows: Sequence[Sequence[int]], *, packed: bool) -> tuple[Any, Any]:
    """The hidden states of all tokens, and all gradients of a random sum of them, computed row by row."""
    import numpy as np
    import torch

    from penstock_learner.model.attention.packed_layout import Packing
    from penstock_learner.model.causal_lm import hidden_states

    parts = []
    for ids, lengths in zip(token_ids.split([sum(row) for row in rows]), rows, strict=True):
        if packed:
            packing = Packing.of(np.array(lengths), token_ids.device)
            parts.append(hidden_states(lm, ids, packing.columns, packing))
        else:
            parts.append(lm.model(input_ids=ids[None], use_cache=False).last_hidden_state[0])
    states = torch.cat(parts).float()
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states.device)
    (states * weights).sum().backward()
    gradients = [p.grad.float().flatten() for p in lm.parameters() if p.grad is not None]
    return states.detach(), torch.cat(gradients)


if __name__ == "__main__":
    sys.exit(run_models(NAME, "hybrid layers on one GPU", sized("exact,2b", "tiny"), TIMEOUTS_S, bench_model))
