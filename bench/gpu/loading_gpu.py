"""Memory of the policy's ranks on a GPU, beside the figures of `penstock plan`: loading, a step, gathering, a push.

    PYTHONPATH=.:learner:tools:bench python bench/gpu/loading_gpu.py [--models 0.5b,1.5b,7b] [--ranks 1,2,4]

It needs one GPU, torch, transformers, peft and pydantic, and neither Ray nor Redis. All ranks share the GPU and meet by
NCCL. The models are random, with the shapes of Qwen2.5, in bfloat16 files. Master weights are float32. Those of 7B are
bfloat16 in all phases but loading and gathering, because four ranks with float32 masters do not fit on one GPU. The
naive way loads the whole model in every rank, and then shards it; it is measured for comparison. Rows are written to
`bench/results/loading_gpu.json` as they are measured, beside those of other models and numbers of ranks. `--models
tiny` runs on any machine, to try the script.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import RESULTS, Bar, Measurement, ends_without, report, sized
from learner_parts.models import SHAPES
from loading_parts.jobs import Job, Outcome, run_job

NAME = "loading_gpu"
TIMEOUT_S = 240.0
MICRO_BATCH_TOKENS = 8192
PHASES = {"load": ("read", "check"), "step": ("step",), "gather": ("gather",), "push": ("push",)}
"""What is measured for each phase of the plan. Loading ends with the self-check."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--models", default=sized("0.5b,1.5b,7b", "tiny"))
    parser.add_argument("--ranks", default=sized("1,2,4", "1"))
    parser.add_argument("--without-step", action="store_true", help="only load, gather and push")
    arguments = parser.parse_args()
    ends_without("ranks on a GPU")
    bench = LoadingBench(takes_step=not arguments.without_step)
    for model in arguments.models.split(","):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=_memory_folder()) as work:
            write_model(model, Path(work) / "model")
            for num_ranks in map(int, arguments.ranks.split(",")):
                bench.measure(model, num_ranks, work)
    return 0 if bench.save() else 1


class LoadingBench:
    """The rows so far, with those of earlier runs."""

    def __init__(self, *, takes_step: bool) -> None:
        self.takes_step = takes_step
        path = RESULTS / f"{NAME}.json"
        earlier = json.loads(path.read_text()) if path.exists() else {"rows": [], "bars": []}
        self.rows: list[dict[str, Any]] = earlier["rows"]
        self.bars = [Bar(bar["name"], bar["value"], bar["goal"], bar["at_most"]) for bar in earlier["bars"]]

    def measure(self, model: str, num_ranks: int, work: str) -> None:
        kept = () if self.takes_step else ("step",)
        self.rows = [r for r in self.rows if (r["model"], r["ranks"]) != (model, num_ranks) or r["phase"] in kept]
        measured = f"{model}, {num_ranks} ranks: "
        self.bars = [b for b in self.bars if not b.name.startswith(measured) or (kept and "naive" in b.name)]
        masters = "bfloat16" if model == "7b" else "float32"
        job = Job(
            f"{work}/model", work, f"{num_ranks}-ranks", num_ranks,
            ("check", "step" if self.takes_step else "state", "gather", "push"),
            master_dtype=masters, micro_batch_tokens=MICRO_BATCH_TOKENS,
        )  # fmt: skip
        self._add_rows(model, job, run_job(job, TIMEOUT_S))
        bounded = Job(f"{work}/model", work, f"{num_ranks}-bounded", num_ranks, ("gather",))
        outcome = run_job(bounded, TIMEOUT_S)
        if outcome is not None:
            self._judge(model, num_ranks, outcome)
        if num_ranks == 4 and model != "7b" and self.takes_step:
            naive = run_job(Job(f"{work}/model", work, "naive", num_ranks, (), way="naive"), TIMEOUT_S)
            if naive is not None and outcome is not None:
                ratio = naive.peak("read", "device") / max(1, outcome.peak("read", "device"))
                self.bars.append(Bar(f"{model}, {num_ranks} ranks: load, naive device peak / ours", ratio, 2.0))
        self.save()

    def _judge(self, model: str, num_ranks: int, outcome: Outcome) -> None:
        for phase, memory, whole in (
            ("read", "device", "layer"), ("read", "host", "layer"), ("gather", "device", "root"),
        ):  # fmt: skip
            name = f"{model}, {num_ranks} ranks: {phase}, {memory} peak / (1.15 x part + {whole})"
            self.bars.append(Bar(name, outcome.share_of_bound(phase, memory), 1.0, at_most=True))

    def _add_rows(self, model: str, job: Job, outcome: Outcome | None) -> None:
        if outcome is None:
            print(f"{model}, {job.num_ranks} ranks failed", flush=True)
            return
        for phase, measured in PHASES.items():
            if not set(measured) <= {"read", *job.phases}:
                continue
            row: dict[str, Any] = {
                "model": model,
                "ranks": job.num_ranks,
                "phase": phase,
                "measured_device_bytes": max(outcome.peak(each, "device") for each in measured),
                "measured_host_bytes": max(outcome.peak(each, "host") for each in measured),
                "planned_device_bytes": planned_bytes(model, job, phase),
                "master_dtype": job.master_dtype,
                "micro_batch_tokens": job.micro_batch_tokens,
            }
            self.rows.append(row)
            shown = {key: value / 1e9 for key, value in row.items() if key.endswith("_bytes")}
            print(f"{model}, {job.num_ranks} ranks, {phase}: " + ", ".join(f"{k} {v:.2f} GB" for k, v in shown.items()))
            sys.stdout.flush()

    def save(self) -> bool:
        """Write the results. The rows are in the file beside the bars."""
        measured = [
            Measurement(f"{row['model']}, {row['ranks']} ranks: {row['phase']}", "GB", [gb])
            for row in self.rows
            if (gb := row["measured_device_bytes"] / 1e9) > 0
        ]
        met = report(NAME, "Memory of a rank on a GPU that all ranks share", measured, self.bars)
        path = RESULTS / f"{NAME}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": self.rows}, indent=1) + "\n")
        return met


def planned_bytes(model: str, job: Job, phase: Any) -> float:
    """The plan's figure, without the context of CUDA and NCCL, which torch does not count. 0 for a tiny model."""
    from penstock_tools.sizing.hardware import CONTEXT_BYTES
    from penstock_tools.sizing.memory import Setup, peak, role_moments, total
    from penstock_tools.sizing.models import find_shape

    if model == "tiny":
        return 0.0
    setup = Setup(
        micro_batch_tokens=job.micro_batch_tokens,
        master_bytes=2 if job.master_dtype == "bfloat16" else 4,
        staging="host",
    )
    moments = role_moments("policy", find_shape(model), job.num_ranks, setup)
    return total(peak(moments, phase).device) - CONTEXT_BYTES


def write_model(name: str, folder: Path) -> None:
    """Write random weights in bfloat16. They are made on the GPU."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[name].config(), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


def _memory_folder() -> str | None:
    """A folder in memory, if there is room for the largest model."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 40e9 else None


if __name__ == "__main__":
    raise SystemExit(main())
