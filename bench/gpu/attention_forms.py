"""What windows, soft caps and sinks cost: the learner's step of a model with them, and of the same model without.

    PYTHONPATH=.:learner:bench python bench/gpu/attention_forms.py [--models mistral,gemma2,gpt-oss] [--no-compile]

Both contenders are the same model: one ignores these parts of attention and head. They take turns on the same mixed
lengths. It also times attention alone, forwards and backwards, in each implementation that can compute it.
`--models tiny` runs on any machine, to try the script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from harness import Results, run_parts, save, say, sized
from learner_parts.models import Setting

NAME = "attention_forms"
GOAL = 0.85
TIMEOUTS_S = {"tiny": 200.0, "mistral": 200.0, "gemma2": 240.0, "gpt-oss": 240.0}
ROUNDS = sized(3, 1)
LENGTHS = (8192, 4096, 1024, 6144, 2048, 8192, 512, 2304)
TINY_LENGTHS = (64, 40, 24)


@dataclass(frozen=True)
class FormShape:
    """A model of few layers with the attention and head of a family."""

    settings: dict[str, Any]
    model_type: str
    vocabulary: int = 32768

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(self.model_type, vocab_size=self.vocabulary, **self.settings)


SHAPES = {
    "tiny": FormShape(
        {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16, "max_position_embeddings": 256,
        },
        "gemma2",
        512,
    ),
    "mistral": FormShape(
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 6, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 4096, "max_position_embeddings": 32768,
        },
        "mistral",
    ),
    "gemma2": FormShape(
        {
            "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "max_position_embeddings": 8192,
        },
        "gemma2",
        256000,
    ),
    "gpt-oss": FormShape(
        {
            "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 6, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_local_experts": 4,
            "num_experts_per_tok": 2, "max_position_embeddings": 32768,
        },
        "gpt_oss",
        201088,
    ),
}  # fmt: skip


@contextmanager
def ignoring_forms() -> Iterator[None]:
    """Attention without windows, soft caps and sinks."""
    from penstock_learner.model.attention import packed_attention

    kept = packed_attention.attend

    def plain(q: Any, k: Any, v: Any, packing: Any, form: Any) -> Any:
        return kept(q, k, v, packing, replace(form, window=None, softcap=None, sinks=None))

    packed_attention.attend = plain
    try:
        yield
    finally:
        packed_attention.attend = kept


def bench_shape(name: str, compiled: bool) -> Results:
    import torch
    import torch.distributed as dist

    from learner_parts.steps import Ours, clear, make_batch, time_steps
    from penstock_learner.model.architectures import LogitForm
    from penstock_learner.model.torch_settings import set_up_torch

    set_up_torch(torch.get_num_threads(), compiles=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    results = Results()
    shape: Any = SHAPES[name]
    if device.type == "cuda":
        attention_alone(shape, device, results)
        save(results)
    batch = make_batch(TINY_LENGTHS if name == "tiny" else LENGTHS, shape.vocabulary)
    setting = Setting(0.0, 16384)
    rates: dict[str, list[float]] = {}
    for label in ("with", "without"):
        contender = Ours(shape, device, "bfloat16", setting, compiled)
        if label == "with":
            rates[label] = time_steps(contender, batch, ROUNDS, device)
        else:
            contender.model.logit_form = LogitForm()
            with ignoring_forms():
                rates[label] = time_steps(contender, batch, ROUNDS, device)
        results.add(f"{label} windows, caps, sinks", "tokens/s", *rates[label])
        save(results)
        del contender
        clear(device)
    middle = {label: sorted(values)[len(values) // 2] for label, values in rates.items()}
    if device.type == "cuda":
        results.bar("with / without", middle["with"] / middle["without"], GOAL)
    dist.destroy_process_group()
    return results


def attention_alone(shape: FormShape, device: Any, results: Results) -> None:
    """Milliseconds of one layer's attention, forwards and backwards."""
    import numpy as np
    import torch

    from penstock_learner.model.attention import packed_attention as kernels
    from penstock_learner.model.attention.packed_attention import ScoreForm
    from penstock_learner.model.attention.packed_layout import Packing

    packing = Packing.of(np.array(LENGTHS[:4], dtype=np.int64), device)
    sizes = shape.settings
    heads, keys, dim = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    tokens, window = int(packing.lengths.sum()), sizes["sliding_window"]
    q, k, v = (
        torch.randn(tokens, count, dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, keys, keys)
    )
    sinks = torch.randn(heads, device=device, requires_grad=True)
    cases = {
        "varlen": (kernels._varlen, ScoreForm(None, None, None, None)),
        "varlen, window": (kernels._varlen, ScoreForm(None, window, None, None)),
        "flexible": (kernels.flexible, ScoreForm(None, None, None, None)),
        "flexible, window": (kernels.flexible, ScoreForm(None, window, None, None)),
        "flexible, soft cap": (kernels.flexible, ScoreForm(None, None, 50.0, None)),
        "flexible, window and sinks": (kernels.flexible, ScoreForm(None, window, None, sinks)),
    }
    for name, (kernel, form) in cases.items():
        try:
            results.add(
                f"attention alone, {name}",
                "ms",
                *_times(lambda kernel=kernel, form=form: kernel(q, k, v, packing, form)),
            )
        except Exception as error:
            say(f"{name} failed: {type(error).__name__}: {str(error)[:300]}")


def _times(run: Any) -> list[float]:
    import torch

    times = []
    for index in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        output = run()
        output.backward(torch.ones_like(output))
        end.record()
        torch.cuda.synchronize()
        if index > 1:
            times.append(start.elapsed_time(end))
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=sized("mistral,gemma2,gpt-oss", "tiny"))
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile for the layers")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    is_met = run_parts(
        NAME, "cost of windows, caps and sinks", models, TIMEOUTS_S,
        lambda name: bench_shape(name, not arguments.no_compile and name != "tiny"),
    )  # fmt: skip
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
