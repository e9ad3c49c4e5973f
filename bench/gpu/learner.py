"""Compares the learner's training step on one GPU with plain Hugging Face, on the same sequences in the same run.

    PYTHONPATH=.:learner:bench python bench/gpu/learner.py [--models 0.5b,1.5b,7b] [--no-compile]

It needs torch, transformers and pydantic, and TRL for TRL's figures. It runs one process with one rank per model,
without Ray. MFU is relative to the speed of a large bfloat16 product in the same run, and once more relative to what
the GPU's maker states (`NOMINAL_FLOPS`). Recomputation does not count as work. Memory is the peak of a step beyond
parameters, gradients and Adam's state. `--models tiny` runs on any machine, to try the script.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from harness import Results, run_models, save, say, sized
from learner_parts.models import Setting

NAME = "learner"
TIMEOUTS_S = {"tiny": 300.0, "0.5b": 150.0, "1.5b": 170.0, "7b": 250.0}
MASTERS = sized(("bfloat16", "float32"), ("bfloat16",))
NUM_STEPS = sized(3, 1)
NOMINAL_FLOPS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""FLOP/s of dense bfloat16 products that the makers' data sheets state (SXM forms), by a part of the device's name."""


def bench_model(name: str, compiled: bool) -> Results:
    import torch
    import torch.distributed as dist

    from learner_parts.models import SHAPES
    from learner_parts.steps import clear, make_batch, matmul_flops, start_only_rank
    from penstock_learner.model.torch_settings import set_up_torch

    set_up_torch(torch.get_num_threads(), compiles=True)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # torch would quietly run a layer uncompiled

    shape = SHAPES[name]
    device = start_only_rank()
    results = Results()
    peak = matmul_flops(device)
    results.add("large bfloat16 product", "TFLOP/s", peak / 1e12)
    bench = _ModelBench(shape, device, results, peak, make_batch)
    bench.plain()
    save(results)
    clear(device)
    for masters in MASTERS:
        is_judged = masters == MASTERS[0]
        for attempt in (compiled, False):
            try:
                bench.ours(masters, attempt, is_judged)
                save(results)
                break
            except torch.OutOfMemoryError as error:
                say(f"ours, {masters} masters: out of memory ({str(error).splitlines()[0]})")
                break
            except Exception as error:
                if not attempt:
                    raise
                say(f"compiled layers failed, trying without: {type(error).__name__}: {str(error)[:300]}")
        clear(device)
    bench.trl()
    dist.destroy_process_group()
    return results


class _ModelBench:
    """The figures of one model."""

    def __init__(
        self, shape: Any, device: Any, results: Results, peak_flops: float, make_batch: Callable[..., Any]
    ) -> None:
        self.shape = shape
        self.device = device
        self.results = results
        self.peak_flops = peak_flops
        self.uniform = make_batch(shape.uniform(), shape.vocabulary)
        self.mixed = make_batch(shape.mixed(), shape.vocabulary)
        self.plain_beyond = 0
        self.plain_mixed: list[float] = []
        self.exact_log_probs: Any = None
        self.plain_error = 0.0

    def plain(self) -> None:
        from learner_parts.steps import Plain

        contender = Plain(self.shape, self.device)
        sequence = self.uniform.select([0])
        self.exact_log_probs = contender.log_probs(sequence, exact=True)
        self.plain_error = float((contender.log_probs(sequence) - self.exact_log_probs).abs().mean())
        self._uniform("plain", contender)
        self.plain_beyond = self._memory("plain", contender)
        self.plain_mixed = self._mixed("plain, padded", contender)

    def ours(self, masters: str, compiled: bool, is_judged: bool) -> None:
        """Measure every setting on equal lengths, and the fastest one within the memory bar on mixed lengths."""
        from learner_parts.steps import Ours, clear

        name = f"ours, {masters} masters" + (", compiled" if compiled else "")
        found: list[tuple[bool, float, int, Setting]] = []
        for setting in self.shape.settings:
            label = f"{name}, {setting}"
            started = time.time()
            contender = Ours(self.shape, self.device, masters, setting, compiled)
            contender.step(self.mixed)  # compile the layers for any length now, not while they are timed
            say(f"{label}: ready after {time.time() - started:.0f} s")
            if not found and is_judged:
                self._agreement(contender)
            rate = self._uniform(label, contender)
            beyond = self._memory(label, contender)
            is_small = beyond <= 0.4 * self.plain_beyond
            found.append((is_small, rate, beyond, setting))
            if max(found)[3] == setting:
                mixed = self._mixed(label, contender)
            del contender
            clear(self.device)
        _, rate, beyond, _ = max(found)
        if is_judged and self.device.type == "cuda":
            self.results.bar("MFU", self._mfu(rate), self.shape.mfu_goal)
            self.results.bar("memory beyond state / plain", beyond / max(self.plain_beyond, 1), 0.4, at_most=True)
            times = sorted(mixed)[len(mixed) // 2] / sorted(self.plain_mixed)[len(mixed) // 2]
            if self.shape.mixed_goal:
                self.results.bar("mixed lengths / plain", times, self.shape.mixed_goal)
            else:
                self.results.add("mixed lengths / plain", "×", times)

    def trl(self) -> None:
        try:
            from learner_parts.trl_steps import Trl
        except ImportError as error:
            say(f"TRL is not installed, so its step is skipped: {error}")
            return
        try:
            contender = Trl(self.shape, self.device)
            self._uniform("TRL's GRPO loss", contender)
            self._memory("TRL's GRPO loss", contender)
            self._mixed("TRL's GRPO loss", contender)
        except Exception as error:
            say(f"TRL's step failed and is skipped: {type(error).__name__}: {str(error)[:300]}")

    def _agreement(self, contender: Any) -> None:
        """Compare the error of our log-probs, relative to float32, with the error of plain bfloat16."""
        error = float((contender.log_probs(self.uniform.select([0])) - self.exact_log_probs).abs().mean())
        self.results.add("plain, error of log-probs", "nats", self.plain_error)
        self.results.add("ours, error of log-probs", "nats", error)
        self.results.bar("error of log-probs / plain", error / self.plain_error, 1.2, at_most=True)

    def _uniform(self, label: str, contender: Any) -> float:
        from learner_parts.steps import time_steps

        rates = time_steps(contender, self.uniform, NUM_STEPS, self.device)
        self.results.add(f"{label}, equal lengths", "tokens/s", *rates)
        median = sorted(rates)[len(rates) // 2]
        self.results.add(f"{label}, MFU", "of the product", self._mfu(median))
        if nominal := nominal_flops(self.device):
            share = self._mfu(median) * self.peak_flops / nominal
            self.results.add(f"{label}, nominal MFU", f"of {nominal / 1e12:.0f} TFLOP/s", share)
        return median

    def _mixed(self, label: str, contender: Any) -> list[float]:
        from learner_parts.steps import time_steps

        rates = time_steps(contender, self.mixed, NUM_STEPS, self.device)
        self.results.add(f"{label}, mixed lengths", "tokens/s", *rates)
        return rates

    def _memory(self, label: str, contender: Any) -> int:
        from learner_parts.steps import GIB, peak_bytes

        peak, state = peak_bytes(contender, self.uniform, self.device), contender.state_bytes()
        self.results.add(f"{label}, peak memory", "GiB", peak / GIB)
        self.results.add(f"{label}, memory beyond state", "GiB", (peak - state) / GIB)
        # Gradients do not exist yet when activations are largest, so this is the memory of the activations.
        self.results.add(f"{label}, memory beyond weights and Adam", "GiB", (peak - state * 3 // 4) / GIB)
        return int(peak - state)

    def _mfu(self, tokens_per_second: float) -> float:
        return float(self.shape.flops_per_token(self.shape.length) * tokens_per_second / self.peak_flops)


def nominal_flops(device: Any) -> float | None:
    """The maker's figure for the GPU, or None if it is not known here."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for part, flops in NOMINAL_FLOPS.items() if part in name), None)


if __name__ == "__main__":
    sys.exit(run_models(NAME, "training step on one GPU", sized("0.5b,1.5b,7b", "tiny"), TIMEOUTS_S, bench_model))
