"""Compares the learner's training step with and without shared prefixes, on the same groups in the same run.

    PYTHONPATH=.:learner:bench python bench/gpu/prefixes.py [--models 1.5b,0.5b] [--no-compile]

A batch is eight groups of eight samples, in micro-batches of at most 16,384 tokens. Each shape of prompt and response
is measured in alternating rounds. The last shape has responses of random lengths. Log-probs of both differ by the
rounding of bfloat16; tests/gpu/test_prefixes_on_cuda.py compares them with float32. `--models tiny` runs on any
machine, to try the script.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from harness import Results, run_models, save, say, sized

NAME = "prefixes"
TIMEOUTS_S = {"tiny": 300.0, "0.5b": 300.0, "1.5b": 300.0}
GOALS = {(1024, 1024): 1.5, (4096, 1024): 2.5, (128, 1024): 1.0}
"""Speed-up by (prompt, response) tokens of a sequence, for the 1.5B model."""
MIXED = (1024, 1024)
"""The shape that is measured with random lengths, too."""
NUM_GROUPS, NUM_SAMPLES, NUM_ROUNDS = sized((8, 8, 3), (2, 2, 1))
MICRO_BATCH_TOKENS = 16384


def make_batch(prompt: int, response: int, vocabulary: int, *, is_mixed: bool = False) -> Any:
    """Random groups whose samples share their prompt. If mixed, responses have an eighth of their tokens or more."""
    import numpy as np

    from penstock_learner.batches.sequence_batch import SequenceBatch

    random = np.random.default_rng(3)
    num_sequences = NUM_GROUPS * NUM_SAMPLES
    sizes = (
        random.integers(max(1, response // 8), response + 1, num_sequences) if is_mixed else [response] * num_sequences
    )
    prompts = random.integers(0, vocabulary, (NUM_GROUPS, prompt))
    sequences = [
        np.concatenate([prompts[index // NUM_SAMPLES], random.integers(0, vocabulary, size)])
        for index, size in enumerate(sizes)
    ]
    num_responses = int(np.sum(sizes))
    return SequenceBatch(
        token_ids=np.concatenate(sequences),
        lengths=np.array([len(sequence) for sequence in sequences]),
        prompt_lengths=np.full(num_sequences, prompt),
        rewards=np.zeros(num_sequences, dtype=np.float32),
        group_ids=np.repeat(np.arange(NUM_GROUPS), NUM_SAMPLES),
        loss_mask=np.ones(num_responses, dtype=np.uint8),
        behaviour_log_probs=np.full(num_responses, -np.log(vocabulary), dtype=np.float32),
        token_versions=np.zeros(num_responses, dtype=np.int64),
        temperatures=np.ones(num_responses, dtype=np.float32),
        advantages=random.normal(size=num_responses).astype(np.float32),
    )


def bench_model(name: str, compiled: bool) -> Results:
    import torch
    import torch.distributed as dist

    from learner_parts.models import SHAPES, Setting
    from learner_parts.steps import Ours, clear, start_only_rank
    from penstock_learner.model.torch_settings import set_up_torch

    set_up_torch(torch.get_num_threads(), compiles=True)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # torch would quietly run a layer uncompiled
    device = start_only_rank()
    results, shape = Results(), SHAPES[name]
    setting = shape.settings[0]
    contender = Ours(shape, device, "bfloat16", Setting(setting.recomputed, MICRO_BATCH_TOKENS, setting.kept), compiled)
    for (prompt, response), is_mixed in [*((shape, False) for shape in sized(list(GOALS), [])), (MIXED, True)]:
        scale = 1 if name != "tiny" else sized(64, 256)
        batch = make_batch(max(1, prompt // scale), response // scale, shape.vocabulary, is_mixed=is_mixed)
        label = f"{prompt} + {response}" + (", mixed" if is_mixed else "")
        bench = _ShapeBench(contender, batch, device, results, label)
        bench.agreement()
        speed_up, memory = bench.measure()
        if name == "1.5b" and device.type == "cuda" and not is_mixed:
            results.bar(f"{label}: speed-up", speed_up, GOALS[prompt, response])
            results.bar(f"{label}: memory / without", memory, 1.0, at_most=True)
        else:
            results.add(f"{label}: speed-up", "×", speed_up)
        save(results)
        clear(device)
    dist.destroy_process_group()
    return results


class _ShapeBench:
    """The figures of one shape of prompts and responses."""

    def __init__(self, contender: Any, batch: Any, device: Any, results: Results, label: str) -> None:
        self.contender = contender
        self.batch = batch
        self.device = device
        self.results = results
        self.label = label

    def measure(self) -> tuple[float, float]:
        """Seconds of a step without sharing / with it, and the same of peak memory beyond the state."""
        from learner_parts.steps import GIB

        seconds: dict[bool, list[float]] = {True: [], False: []}
        memory: dict[bool, int] = {}
        for shares in seconds:  # compiles
            started = time.time()
            self._step(shares)
            say(f"{self.label}, {_name(shares)}: ready after {time.time() - started:.0f} s")
        for _ in range(NUM_ROUNDS):
            for shares, taken in seconds.items():
                step_s, peak = self._step(shares)
                taken.append(step_s)
                memory[shares] = peak - self.contender.state_bytes() * 3 // 4
        num_tokens = int(self.batch.lengths.sum())
        for shares, taken in seconds.items():
            label = f"{self.label}, {_name(shares)}"
            self.results.add(label, "tokens/s", *[num_tokens / each for each in taken])
            self.results.add(f"{label}, memory of activations", "GiB", memory[shares] / GIB)
        with_sharing, without = (sorted(seconds[shares])[NUM_ROUNDS // 2] for shares in (True, False))
        return without / with_sharing, memory[True] / max(memory[False], 1)

    def agreement(self) -> None:
        """Log-probs of the first group with sharing and without."""
        group = self.batch.select(range(NUM_SAMPLES))
        shared, alone = (self._log_probs(group, shares) for shares in (True, False))
        self.results.add(f"{self.label}, largest difference of log-probs", "nats", float(abs(shared - alone).max()))
        self.results.add(f"{self.label}, mean difference of log-probs", "nats", float(abs(shared - alone).mean()))

    def _log_probs(self, group: Any, shares: bool) -> Any:
        from penstock_learner.batches.partition import partition

        (shard,) = partition(group, 1, 65536, shares_prefixes=shares)
        assert shard.shares_prefixes == shares
        return self.contender.update.log_probs(shard)

    def _step(self, shares: bool) -> tuple[float, int]:
        """Seconds and peak bytes of one optimizer step."""
        import torch

        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        self.contender.step(self.batch, shares_prefixes=shares)
        if is_cuda:
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() if is_cuda else 0
        return time.perf_counter() - started, peak


def _name(shares: bool) -> str:
    return "shared" if shares else "not shared"


if __name__ == "__main__":
    sys.exit(
        run_models(
            NAME, "training step with shared prefixes on one GPU", sized("1.5b", "tiny"), TIMEOUTS_S, bench_model
        )
    )
