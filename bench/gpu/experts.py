"""Times the training pass of a mixture of experts, compiled and not, with router replay, metrics and auxiliary loss.

    PYTHONPATH=.:learner:bench python bench/gpu/experts.py [--models 30b-layers] [--no-compile]

`30b-layers` has layers of Qwen3-30B-A3B's shape and a small vocabulary, so the layers are what is measured: forward and
backward pass of 16k tokens, without the optimizer. MFU is relative to the speed of a large bfloat16 product in the same
run, and counts the experts that a token uses. `no replay` has metrics only; `experts of transformers` has the grouped
products that transformers comes with. `--models tiny` runs on any machine, to try the script.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from harness import Results, run_models, save, say, sized
from learner_parts.models import Setting, Shape

NAME = "experts"
TIMEOUTS_S = {"tiny": 300.0, "30b-layers": 500.0}
NUM_STEPS = sized(5, 1)
MFU_GOAL = 0.45


@dataclass(frozen=True)
class Mixture(Shape):
    """The sizes of a Qwen3-MoE model. `intermediate` is that of one expert."""

    experts: int = 128
    top_k: int = 8
    head_size: int = 128

    @property
    def head_dim(self) -> int:
        return self.head_size

    @property
    def matmul_weights(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.key_heads)
        experts = self.top_k * 3 * self.hidden * self.intermediate + self.experts * self.hidden
        return self.layers * (attention + experts) + self.vocabulary * self.hidden

    def config(self) -> Any:
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.intermediate,
            moe_intermediate_size=self.intermediate, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads, head_dim=self.head_dim, num_experts=self.experts,
            num_experts_per_tok=self.top_k, norm_topk_prob=True, max_position_embeddings=32768,
            tie_word_embeddings=False, rope_theta=1_000_000.0,
        )  # fmt: skip


SHAPES = {
    "tiny": Mixture(64, 32, 2, 4, 2, 256, False, 4, *sized((64, 8), (8, 4)), experts=8, top_k=2, head_size=16),
    "30b-layers": Mixture(2048, 768, 8, 32, 4, 4096, False, 4, 4096),
}
REPLAY = {"replay": True, "aux_loss_coefficient": 0.001}


def bench_model(name: str, compiled: bool) -> Results:
    import torch
    import torch.distributed as dist

    from learner_parts.steps import clear, make_batch, matmul_flops, start_only_rank
    from penstock_learner.model import experts
    from penstock_learner.model.torch_settings import set_up_torch

    set_up_torch(torch.get_num_threads(), compiles=True)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # torch would quietly run a layer uncompiled
    shape, device, results = SHAPES[name], start_only_rank(), Results()
    peak = matmul_flops(device)
    results.add("large bfloat16 product", "TFLOP/s", peak / 1e12)
    batch = _with_experts(make_batch(shape.uniform(), shape.vocabulary), shape)
    exact = _log_probs(_contender(shape, device, "float32", False, experts.NAME, REPLAY), batch, "float32")
    clear(device)
    variants: dict[str, tuple[bool, str, dict[str, Any]]] = {
        f"replay{_suffix(compiled)}": (compiled, experts.NAME, REPLAY),
        f"no replay{_suffix(compiled)}": (compiled, experts.NAME, {}),
        f"replay, experts of transformers{_suffix(compiled)}": (compiled, "grouped_mm", REPLAY),
        f"replay{_suffix(False)}": (False, experts.NAME, REPLAY),
    }
    errors, mfus = {}, {}
    for label, (is_compiled, kind, router) in variants.items():
        contender = _contender(shape, device, "bfloat16", is_compiled, kind, router)
        mfus[label] = _measure(label, contender, batch, shape, device, peak, results)
        if router:
            errors[label] = float((_log_probs(contender, batch, "bfloat16") - exact).abs().mean())
            results.add(f"{label}, error of log-probs", "nats", errors[label])
        del contender
        save(results)
        clear(device)
    if compiled:
        results.bar("MFU, compiled, with replay and metrics", mfus["replay, compiled"], MFU_GOAL)
        results.bar("graph breaks", sum(torch._dynamo.utils.counters["graph_break"].values()), 0, at_most=True)
        error = errors["replay, compiled"] / errors["replay, not compiled"]
        results.bar("error of log-probs, compiled / not", error, 1.2, at_most=True)
    else:
        error = errors["replay, not compiled"] / max(errors["replay, experts of transformers, not compiled"], 1e-9)
        results.bar("error of log-probs / experts of transformers", error, 1.2, at_most=True)
    dist.destroy_process_group()
    return results


def _suffix(compiled: bool) -> str:
    return ", compiled" if compiled else ", not compiled"


def _with_experts(batch: Any, shape: Mixture) -> Any:
    """The batch with random experts for every token and layer."""
    import numpy as np

    scores = np.random.default_rng(5).random((int(batch.lengths.sum()) * shape.layers, shape.experts), dtype=np.float32)
    chosen = np.argpartition(scores, shape.top_k, axis=1)[:, : shape.top_k].astype(np.uint8)
    return replace(batch, routed_experts=chosen.reshape(-1, shape.layers, shape.top_k))


def _contender(shape: Mixture, device: Any, masters: str, compiled: bool, experts: str, router: dict[str, Any]) -> Any:
    from learner_parts.steps import Ours

    setting = Setting(0.0, sum(shape.uniform()))
    return Ours(shape, device, masters, setting, compiled, experts=experts, router=router, compute_dtype=masters)


def _log_probs(contender: Any, batch: Any, dtype: str) -> Any:
    """Log-probs of one sequence, with its replayed experts."""
    say(f"log-probs in {dtype}")
    return contender.log_probs(batch.select([0])).float()


def _measure(label: str, ours: Any, batch: Any, shape: Mixture, device: Any, peak: float, results: Results) -> float:
    """The MFU of a forward and backward pass."""
    from learner_parts.steps import GIB, Passes, peak_bytes, time_steps

    started = time.time()
    passes = Passes(ours)
    passes.step(batch)
    say(f"{label}: ready after {time.time() - started:.0f} s")
    rates = time_steps(passes, batch, NUM_STEPS, device)
    mfu = statistics.median(rates) * shape.flops_per_token(shape.length) / peak
    results.add(f"{label}, forward and backward", "tokens/s", *rates)
    results.add(f"{label}, MFU", "of the product", mfu)
    results.add(f"{label}, peak memory beyond weights", "GiB",
                (peak_bytes(passes, batch, device) - passes.state_bytes() // 4) / GIB)  # fmt: skip
    return float(mfu)


if __name__ == "__main__":
    sys.exit(run_models(NAME, "experts in training", sized("30b-layers", "tiny"), TIMEOUTS_S, bench_model))
