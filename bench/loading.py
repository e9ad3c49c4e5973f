"""Memory of a rank while it loads, resumes and gathers: four ranks on a CPU, ours and the naive way in the same run.

make bench-loading

The naive way is `from_pretrained` in every rank, and then FSDP2. bench/gpu/loading_gpu.py measures the same with NCCL.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from harness import Bar, Measurement, ends_without, report, sized
from loading_parts.jobs import Job, Outcome, run_job

NUM_RANKS = sized(4, 1)
TIMEOUT_S = 300.0


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as work:
        num_parameters = write_model(Path(work) / "model")
        ours = run(work, "ours", ("gather", "save"))
        ends_without("ranks that resume")
        resumed = run(work, "resumed", ("restore",))
        naive = run(work, "naive", (), way="naive")
    measured = [
        Measurement(name, "MB", [outcome.peak(phase, "host") / 1e6])
        for name, outcome, phase in (
            ("load, ours", ours, "read"),
            ("load, naive", naive, "read"),
            ("resume", resumed, "restore"),
            ("gather", ours, "gather"),
        )
    ]
    measured.append(Measurement("part of a rank", "MB", [ours.part_bytes() / 1e6]))
    measured.append(Measurement("largest layer", "MB", [ours.layer_bytes() / 1e6]))
    # A rank that resumes also makes room for its part of the gradients and of Adam's state.
    for rank in resumed.ranks:
        rank["resumed_bytes"] = 2 * rank["part_bytes"] + rank["state_bytes"]
    bars = [
        Bar("load, peak / (1.15 x part + layer)", ours.share_of_bound("read", "host"), 1.0, at_most=True),
        Bar("load, naive peak / ours", naive.peak("read", "host") / ours.peak("read", "host"), 2.0),
        Bar(
            "resume, peak / (1.15 x part + layer)", resumed.share_of_bound("restore", "host", "resumed_bytes"), 1.0,
            at_most=True,
        ),
        Bar("gather, peak / (1.15 x part + root)", ours.share_of_bound("gather", "host"), 1.0, at_most=True),
    ]  # fmt: skip
    title = f"{num_parameters / 1e6:.0f}M parameters, bfloat16 in the files and float32 in memory, {NUM_RANKS} ranks"
    return 0 if report("loading", title, measured, bars) else 1


def run(work: str, name: str, phases: tuple[str, ...], way: str = "ours") -> Outcome:
    outcome = run_job(Job(f"{work}/model", work, name, NUM_RANKS, phases, way), TIMEOUT_S)
    assert outcome is not None, f"{name} failed"
    return outcome


def write_model(folder: Path) -> int:
    """Write a random Llama in bfloat16, and return its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sized(32000, 512), hidden_size=sized(1536, 96), intermediate_size=sized(4096, 128),
        num_hidden_layers=sized(16, 2), num_attention_heads=12,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="300MB")
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    raise SystemExit(main())
