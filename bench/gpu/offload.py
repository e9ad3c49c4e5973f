"""Measures what each offload saves and costs: peak GPU memory and time of a training step with a frozen reference.

    PYTHONPATH=.:learner:tools:bench python bench/gpu/offload.py [--models 1.5b]

One rank has the policy in float32, with random weights, and the reference in bfloat16. A step computes the reference's
log-probs of four micro-batches of 8,192 tokens and updates the policy. Memory is the peak of torch's allocator, and is
compared with what `penstock plan` expects. The update of `all` is also timed alone, and compared with torch's AdamW on
the CPU. tests/gpu/test_host_optimizer.py compares updates bit by bit. `--models tiny` runs on any machine, to try the
script.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from typing import Any, NamedTuple

from harness import Results, report_skipped, run_models, save, say, sized

NAME = "offload"
TIMEOUTS_S = {"tiny": 300.0, "0.5b": 200.0, "1.5b": 240.0, "7b": 400.0}
NUM_STEPS = sized(3, 1)
MICRO_BATCH_TOKENS, NUM_MICRO_BATCHES = 8192, 4
TOLERANCE = 0.1
"""How far memory may be from the plan's, as in bench/plan_memory.py."""


class Choice(NamedTuple):
    offload: Any
    """`learner.offload`."""
    reference: bool = False
    """`learner.reference.offload`."""


CHOICES = {
    "none": Choice("none"),
    "reference": Choice("none", reference=True),
    "optimizer": Choice("optimizer"),
    "weights": Choice("weights"),
    "all": Choice("all"),
    "all, reference": Choice("all", reference=True),
}


def bench_model(name: str, compiled: bool) -> Results:
    import torch
    import torch.distributed as dist

    from learner_parts.models import SHAPES
    from learner_parts.steps import GIB, clear, make_batch, start_only_rank
    from penstock_learner.model.torch_settings import set_up_torch

    set_up_torch(torch.get_num_threads(), compiles=False)
    device = start_only_rank()
    results, shape = Results(), SHAPES[name]
    num_sequences = NUM_MICRO_BATCHES * MICRO_BATCH_TOKENS // shape.length if name != "tiny" else 4
    batch = make_batch([shape.length] * num_sequences, shape.vocabulary)
    plain_s = plain_norm = plain_bytes = 0.0
    if device.type != "cuda":
        report_skipped("peak memory", "there is no GPU")
    for label in sized(list(CHOICES), ["none", "all"]):
        choice = CHOICES[label]
        started = time.time()
        contender = _Contender(shape, device, choice)
        norm, _, _ = contender.step(batch)  # allocates the moments, and warms up
        say(f"{label}: ready after {time.time() - started:.0f} s")
        _, seconds, peaks = zip(*(contender.step(batch) for _ in range(NUM_STEPS)), strict=True)
        peak = max(peaks)
        if choice.offload == "none" and not choice.reference:
            plain_s, plain_norm, plain_bytes = statistics.median(seconds), norm, peak
        results.add(f"{label}, step", "s", *seconds)
        results.add(f"{label}, step / none", "×", statistics.median(seconds) / plain_s)
        if label != "none":
            results.bar(f"{label}: gradient / none - 1", abs(norm / plain_norm - 1), 1e-3, at_most=True)
        if device.type == "cuda":
            planned = planned_bytes(name, choice)
            results.add(f"{label}, peak memory", "GiB", peak / GIB)
            results.add(f"{label}, saved", "GiB", (plain_bytes - peak) / GIB)
            results.add(f"{label}, planned memory", "GiB", planned / GIB)
            share = planned / planned_bytes(name, CHOICES["none"])
            if label != "none":
                results.bar(f"{label}: peak memory / none", peak / plain_bytes, share * (1 + TOLERANCE), at_most=True)
            results.bar(f"{label}: planned / measured - 1", abs(planned / peak - 1), TOLERANCE, at_most=True)
        save(results)
        if label == "all":
            results.add("all, update alone", "s", *contender.update_seconds())
            results.add("torch's AdamW on the CPU, update alone", "s", *seconds_on_cpu(contender.num_parameters))
        del contender
        clear(device)
    save(results)
    dist.destroy_process_group()
    return results


def planned_bytes(name: str, choice: Choice) -> float:
    """What `penstock plan` expects of torch's allocator: the policy in the fullest moment of a step, and the
    reference."""
    from penstock_tools.sizing.memory import CONTEXT, STAGED, Setup, peak, role_memory, total
    from penstock_tools.sizing.models import find_shape

    shape, setup = (
        find_shape(name),
        Setup(micro_batch_tokens=MICRO_BATCH_TOKENS, num_micro_batches=NUM_MICRO_BATCHES, offload=choice.offload),
    )
    policy = [
        replace(use, device=tuple(item for item in use.device if item.name not in (CONTEXT, STAGED)))
        for use in role_memory("policy", shape, 1, setup)
    ]
    reference = 0 if choice.reference else setup.pushed_bytes * shape.num_parameters
    return total(peak(policy, "step").device) + reference


def seconds_on_cpu(num_parameters: int) -> list[float]:
    """Seconds of torch's fused AdamW on the CPU with all its threads, for a quarter of the weights, times four."""
    import torch

    part = torch.nn.Parameter(torch.zeros(num_parameters // 4))
    part.grad = torch.ones_like(part)
    optimizer = torch.optim.AdamW([part], lr=1e-6, fused=True)
    seconds = []
    for _ in range(NUM_STEPS + 1):
        started = time.perf_counter()
        optimizer.step()
        seconds.append(4 * (time.perf_counter() - started))
    return seconds[1:]


class _Contender:
    """The policy and the reference of one choice."""

    def __init__(self, shape: Any, device: Any, choice: Choice) -> None:
        import torch

        from learner_parts.models import Setting
        from learner_parts.steps import Ours, make_model
        from penstock_learner.model.architectures import path_of
        from penstock_learner.model.attention import packed_attention
        from penstock_learner.model.causal_lm import CausalLM
        from penstock_learner.model.loading import host_policy, shard

        self.device = device
        algorithm = {"correction": {"mode": "bypass"}, "kl": {"placement": "loss", "penalty": "k3"}}
        setting = Setting(1.0, MICRO_BATCH_TOKENS)
        self.policy = Ours(
            shape, device, "float32", setting, compiled=False, offload=choice.offload, algorithm=algorithm
        )
        self.num_parameters = sum(weight.numel() for weight in self.policy.model.parameters())
        lm = make_model(shape, torch.bfloat16, device, packed_attention.NAME)
        self.reference = CausalLM(lm, self.policy.learner.logprob_chunk_tokens, path_of(lm.config))
        self.reference.requires_grad_(False)
        if choice.reference:
            shard(self.reference, offload=host_policy(True, is_cuda=device.type == "cuda"))

    def step(self, batch: Any) -> tuple[float, float, int]:
        """The norm of the gradient, and seconds and peak bytes of one step."""
        import torch

        from penstock_learner.batches.partition import partition, unpermute
        from penstock_learner.model.causal_lm import forward_log_probs

        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        shards = partition(batch, 1, MICRO_BATCH_TOKENS)
        log_probs = [forward_log_probs(self.reference, shard, self.device) for shard in shards]
        norm = self.policy.step(replace(batch, reference_log_probs=unpermute(log_probs, shards, batch)))
        if is_cuda:
            torch.cuda.synchronize()
        return norm, time.perf_counter() - started, torch.cuda.max_memory_allocated() if is_cuda else 0

    def update_seconds(self) -> list[float]:
        """Seconds of an update alone, which changes nothing: its gradients are scaled by NaN."""
        import torch

        seconds = []
        for _ in range(NUM_STEPS):
            started = time.perf_counter()
            self.policy.update.optimizer.step_scaled(torch.tensor(torch.nan))
            seconds.append(time.perf_counter() - started)  # it waits for its copies
        return seconds


if __name__ == "__main__":
    sys.exit(run_models(NAME, "offload on one GPU", sized("1.5b", "tiny"), TIMEOUTS_S, bench_model))
