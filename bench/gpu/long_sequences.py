"""Measures training steps on long sequences that 1, 2 and 4 ranks share: equal results first, then time and memory.

    PYTHONPATH=.:learner:tools:bench python bench/gpu/long_sequences.py [--lengths 8k,32k,128k]

The model has four layers of Qwen2.5-1.5B, whose two key heads are fewer than four ranks, and random weights. A batch is
one sequence of the length and a shorter one, packed, so that ranks' slices begin inside sequences. Log-probs, loss and
gradient are compared with those of one rank; at 8k also in float32, and there those of a critic and a reward model.
All ranks share one GPU and exchange tokens over loopback, so times show what the exchange costs at its bandwidth, and
no speed-up. Memory is the peak of a rank's allocator, and is compared with what `penstock plan` expects. Without a GPU
the ranks meet over gloo, and sequences are a 64th as long.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import SMOKE, Child, Results, be_a_host_of_its_own, make_parser, report_skipped, run_parts, save, sized

NAME = "long_sequences"
TIMEOUTS_S = {"8k": 120.0, "32k": 100.0, "128k": 180.0}
NUM_RANKS = (1, 2, 4)
NUM_STEPS = sized(2, 1)
CALL_S = sized(100.0, 400.0)
TOLERANCE = 0.1
"""How far memory may be from the plan's, as in bench/plan_memory.py."""
EXACT = {"log-probs": 1e-4, "loss": 1e-5, "gradient": 1e-4, "values": 1e-4, "critic's gradient": 1e-4, "scores": 1e-4}
"""How much float32 may differ from one rank: numbers of tokens by the largest difference, gradients by their norm."""
ROUNDED = {"log-probs": 0.01, "loss": 1e-3, "gradient": 0.01}
"""The same for bfloat16, with the mean difference of log-probs."""


def bench_length(name: str) -> Results:
    import torch

    is_cuda = torch.cuda.device_count() > 0
    length = int(name.removesuffix("k")) * 1024 // (1 if is_cuda else 64 * sized(1, 8))
    lengths, results = [length, length // 8 + 5], Results()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        ranks = [Child(Rank, rank, folder) for rank in range(max(NUM_RANKS))]
        alone: dict[str, Any] = {}
        for num_ranks in NUM_RANKS:
            in_group = ranks[:num_ranks]
            call(in_group, "join", num_ranks)
            if name == "8k":
                for kind in ("policy", "scalar"):
                    exact = call(in_group, kind, lengths, "float32", 0)[0]
                    _compare(f"{num_ranks} ranks, float32", exact, alone, EXACT, results)
            found = call(in_group, "policy", lengths, "bfloat16", NUM_STEPS)
            _compare(f"{num_ranks} ranks", found[0], alone, ROUNDED, results)
            results.add(f"{num_ranks} ranks, step", "s", *found[0]["seconds"])
            results.add(f"{num_ranks} ranks, a reference's log-probs", "s", found[0]["forward_s"])
            if is_cuda:
                _compare_memory(num_ranks, found, alone, sum(lengths), results)
            call(in_group, "leave")
            save(results)
        for child in ranks:
            child.stop()
    return results


def call(ranks: list[Child], method: str, *arguments: Any) -> list[Any]:
    """Call all ranks at once."""
    for child in ranks:
        child.ask(method, *arguments)
    return [child.answer(method, CALL_S) for child in ranks]


def _compare(
    label: str, found: dict[str, Any], alone: dict[str, Any], limits: dict[str, float], results: Results
) -> None:
    """Compare with the results of one rank, which the first call keeps."""
    import torch

    of_type = label.partition(", ")[2]
    for what, limit in limits.items():
        if what not in found:
            continue
        value = torch.as_tensor(found[what]).double()
        expected = alone.setdefault(f"{of_type} {what}", value)
        difference = (value - expected).abs()
        if what.endswith("gradient"):
            difference = difference / expected
        if not label.startswith("1 "):
            error = float(difference.max() if of_type else difference.mean())
            results.bar(f"{label}: {what}", error, limit, at_most=True)
    exact = alone.get("float32 log-probs")
    if not of_type and exact is not None:
        error = float((torch.as_tensor(found["log-probs"]).double() - exact).abs().mean())
        results.add(f"{label}, error of log-probs", "nats", error)
        alone.setdefault("error", error)
        if not label.startswith("1 "):
            results.bar(f"{label}: error of log-probs / one rank", error / alone["error"], 1.2, at_most=True)


def _compare_memory(num_ranks: int, found: Any, alone: dict[str, Any], num_tokens: int, results: Results) -> None:
    """Compare the fullest rank with one rank, and with the plan."""
    from learner_parts.steps import GIB

    peak, beyond = (max(each[key] for each in found) for key in ("peak_bytes", "beyond_bytes"))
    planned = planned_bytes(num_ranks, num_tokens)
    results.add(f"{num_ranks} ranks, peak memory of a rank", "GiB", peak / GIB)
    results.add(f"{num_ranks} ranks, beyond weights and Adam", "GiB", beyond / GIB)
    results.add(f"{num_ranks} ranks, planned memory", "GiB", planned / GIB)
    results.bar(f"{num_ranks} ranks: planned / measured memory - 1", abs(planned / peak - 1), TOLERANCE, at_most=True)
    alone |= {"peak": peak, "planned": planned} if num_ranks == 1 else {}
    if num_ranks > 1:
        share = round(planned / alone["planned"] * (1 + TOLERANCE), 3)
        results.bar(f"{num_ranks} ranks: memory of a rank / one rank", peak / alone["peak"], share, at_most=True)


def planned_bytes(num_ranks: int, num_tokens: int) -> float:
    """What `penstock plan` expects of torch's allocator in the fullest moment of a step."""
    from penstock_tools.sizing.memory import CONTEXT, STAGED, Setup, peak, role_memory, total
    from penstock_tools.sizing.models import find_shape

    ours = shape()
    planned = replace(find_shape("1.5b"), num_layers=ours.layers, vocabulary_size=ours.vocabulary)
    setup = Setup(-(-num_tokens // num_ranks), sequence_parallel=num_ranks, num_micro_batches=1)
    uses = [
        replace(use, device=tuple(item for item in use.device if item.name not in (CONTEXT, STAGED)))
        for use in role_memory("policy", planned, num_ranks, setup)
    ]
    return total(peak(uses, "step").device)


def shape() -> Any:
    """Four layers of the 1.5B model with a small vocabulary, or on a CPU narrow ones with as many heads."""
    import torch

    from learner_parts.models import SHAPES

    found = replace(SHAPES["1.5b"], layers=4, vocabulary=32768)
    return found if torch.cuda.device_count() else replace(found, hidden=96, intermediate=128, layers=2, vocabulary=512)


class Rank:
    """One rank in a process of its own, of groups of several sizes one after the other."""

    def __init__(self, rank: int, folder: str) -> None:
        import torch

        from penstock_learner.model.torch_settings import set_up_torch

        be_a_host_of_its_own()
        set_up_torch(1, compiles=False)
        self.rank = rank
        self.folder = folder
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def join(self, num_ranks: int) -> None:
        import torch.distributed as dist

        from penstock_learner.model.attention.sequence_parallel import make_sequence_parallel

        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        store = dist.FileStore(str(Path(self.folder) / f"store-{num_ranks}"), num_ranks)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=num_ranks)
        self.parallel = make_sequence_parallel(num_ranks)

    def leave(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    def policy(self, lengths: list[int], dtype: str, num_steps: int) -> dict[str, Any]:
        """Log-probs, loss and norm of the gradient of a step, and seconds and peak memory of further steps."""
        import torch

        from learner_parts.models import Setting
        from learner_parts.steps import Ours, clear, make_batch
        from penstock_learner.batches.partition import partition
        from penstock_learner.optim.optimizer import local_shard
        from penstock_learner.steps.program import denominators_of

        batch = make_batch(lengths, shape().vocabulary)
        (shard,) = partition(batch, 1, sum(lengths))
        ours = Ours(
            shape(), self.device, "float32", Setting(1.0, sum(lengths)), compiled=False, parallel=self.parallel,
            compute_dtype=dtype,
        )  # fmt: skip
        log_probs, _ = self._timed(ours.update.log_probs, shard)  # warms up
        report = ours.update.run(shard, denominators_of(batch, ours.learner.algorithm.loss), 1, 0, 0.0)
        found = {"log-probs": log_probs, "loss": report.loss, "gradient": report.step.grad_norm}
        if num_steps:
            found["forward_s"] = self._timed(ours.update.log_probs, shard)[1]
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found["seconds"] = [self._timed(ours.step, batch)[1] for _ in range(num_steps)]
            peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
            state = 3 * sum(local_shard(parameter).nbytes for parameter in ours.model.parameters())
            found |= {"peak_bytes": peak, "beyond_bytes": peak - state}
        del ours, report
        clear(self.device)
        return found

    def scalar(self, lengths: list[int], dtype: str, _: int) -> dict[str, Any]:
        """A critic's values and the norm of its gradient, and the scores of the same model as a reward model."""
        import numpy as np
        import torch
        import torch.distributed as dist
        from transformers import AutoModelForSequenceClassification

        from learner_parts.steps import clear, make_batch
        from penstock.config.learner import LearnerConfig
        from penstock_learner.model.architectures import path_of
        from penstock_learner.model.attention import packed_attention
        from penstock_learner.model.attention.packed_layout import ModelInputs
        from penstock_learner.model.loading import prepare_for_training
        from penstock_learner.model.scalar_model import ScalarModel
        from penstock_learner.model.torch_settings import DTYPES
        from penstock_learner.optim.optimizer import local_shard

        packed_attention.register()
        torch.manual_seed(0)
        config = shape().config()
        config.num_labels = 1
        with self.device:
            lm = AutoModelForSequenceClassification.from_config(
                config, dtype=torch.float32, attn_implementation=packed_attention.NAME
            )
        model = ScalarModel(lm, path_of(config))
        prepare_for_training(model, LearnerConfig(), DTYPES[dtype], is_cuda=self.device.type == "cuda")
        batch = make_batch(lengths, shape().vocabulary)
        inputs = ModelInputs.of(batch, self.device, self.parallel)
        with torch.no_grad():
            last = torch.as_tensor(np.cumsum(batch.lengths) - 1, device=self.device)
            scores = model(inputs, last).cpu().numpy()
        values = model(inputs, inputs.predicting)
        (values.square().mean() * dist.get_world_size()).backward()
        gradients = [local_shard(weight.grad).double() for weight in model.parameters() if weight.grad is not None]
        square = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(square)
        found = {"values": values.detach().cpu().numpy(), "critic's gradient": float(square.sqrt()), "scores": scores}
        del gradients, model, lm, values
        clear(self.device)
        return found

    def _timed(self, work: Callable[[Any], Any], batch: Any) -> tuple[Any, float]:
        """What the call returns, and its seconds on the GPU too."""
        import torch

        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        found = work(batch)
        if is_cuda:
            torch.cuda.synchronize()
        return found, time.perf_counter() - started


def main() -> int:
    parser = make_parser()
    parser.add_argument("--lengths", default=sized("8k,32k,128k", "8k"))
    if SMOKE:
        report_skipped("long sequences, memory and NCCL", "they need a GPU")
    lengths = parser.parse_args().lengths.split(",")
    return 0 if run_parts(NAME, "sequences that ranks share", lengths, TIMEOUTS_S, bench_length) else 1


if __name__ == "__main__":
    sys.exit(main())
