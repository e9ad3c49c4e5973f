"""verl's side of the whole runs: `verl.trainer.main_ppo` with FSDP and vLLM on one GPU, which they take in turns.

Written for verl 0.9.1. Its current trainer is used (`trainer.use_v1`) in its default mode, `sync`. What is not set here
has verl's default. The settings are those of a user who knows verl and has one GPU with room to spare:

- vLLM keeps its weights and its cache on the GPU while training (`free_cache_engine=False`).
- Log-probs and entropies come from fused kernels. flash-attn has no wheel on PyPI, and without it verl's plain path
  computes the log-prob of one token at a time.
- Attention is PyTorch's own (`sdpa`) on padded rows. All sequences have the same length, so nothing is padded.
- Its trainer looks for finished samples every 2 s, which no setting changes, so generation takes a multiple of that.
- The trainer's log-probs correct for vLLM's (`rollout_is=token`), as in the other contenders.

verl is best installed in a separate environment. Hydra needs an older antlr4 than math-verify, and with TRL 1 in
the same environment verl ends when it loads the model: it patches a class that TRL no longer has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import GpuSamples, Results
from whole_run_parts.ours import stop
from whole_run_parts.steps import StepLog
from whole_run_parts.task import Task, rows_of

HERE = Path(__file__).parent
VLLM_MEMORY = 0.3
"""More than all samples of a step need, and it leaves the activations of the 1.5B model room on the same GPU."""
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
"""Batches whose CUDA graphs vLLM captures. All responses are as long, so nearly every step of a run decodes 256."""
VARIANTS = ("liger", "fsdp2", "sleep", "async", "v0")
PHASES = {"gen": "generate", "old_log_prob": "log-probs", "update_actor": "update", "update_weights": "push"}
"""verl's names of the phases of a step, and ours."""
FIRST_ERRORS = 20
LAST_LINES = 60
POLL_S = 0.02
STOP_S = 6.0
"""verl gets this long to end by itself. It is shorter than what a part keeps of its time for its end."""


def settings_of(task: Task, model: Path, prompts: Path, micro_batch_tokens: int, variants: list[str]) -> dict[str, Any]:
    """The settings of a run, by their dotted names. Variants: `liger` takes the kernels of liger-kernel, `fsdp2` shards
    by FSDP2, `sleep` frees vLLM's memory for the trainer in each step, `async` is the trainer that generates ahead, and
    `v0` is the former trainer."""
    is_liger = "liger" in variants
    actor, rollout, fsdp = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "actor.fsdp_config"))
    return {
        "data.train_files": str(prompts),
        "data.val_files": str(prompts),
        "data.val_max_samples": task.num_prompts,
        "data.train_batch_size": task.num_prompts,
        "data.max_prompt_length": task.prompt_tokens,
        "data.max_response_length": task.response_tokens,
        "data.shuffle": False,
        "data.dataloader_num_workers": 1,
        "reward.custom_reward_function.path": str(HERE / "reward.py"),
        "reward.num_workers": 2,
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.rollout_is": "token",
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.model.use_fused_kernels": True,
        "actor_rollout_ref.model.fused_kernel_options.impl_backend": "liger" if is_liger else "torch",
        "actor_rollout_ref.model.use_liger": is_liger,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2" if "fsdp2" in variants else "fsdp",
        f"{fsdp}.model_dtype": "bfloat16",
        f"{fsdp}.reshard_after_forward": False,
        f"{fsdp}.use_no_sync_for_gradient_accumulation": True,
        f"{actor}.ppo_mini_batch_size": task.num_prompts,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": micro_batch_tokens,
        f"{actor}.use_kl_loss": False,
        f"{actor}.optim.lr": task.lr,
        f"{actor}.optim.betas": "[0.9,0.95]",
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.optim.override_optimizer_config": "{fused:true}",
        f"{rollout}.name": "vllm",
        f"{rollout}.n": task.num_samples,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": VLLM_MEMORY,
        f"{rollout}.free_cache_engine": "sleep" in variants,
        f"{rollout}.max_model_len": task.max_tokens,
        f"{rollout}.max_num_seqs": max(task.num_sequences, 16),
        f"{rollout}.cudagraph_capture_sizes": f"[{','.join(map(str, GRAPH_SIZES))}]",
        f"{rollout}.ignore_eos": True,
        f"{rollout}.agent.num_workers": 4,
        "trainer.use_v1": "v0" not in variants,
        "trainer.v1.trainer_mode": "colocate_async" if "async" in variants else "sync",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": task.num_steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": str(prompts.parent / "checkpoints"),
        "trainer.logger": "[console,file]",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
        "hydra.run.dir": str(prompts.parent / "hydra"),
    }  # fmt: skip


def arguments_of(settings: dict[str, Any]) -> list[str]:
    """The settings as verl takes them on the command line."""
    return [f"{name}={value}" for name, value in settings.items()]


def write_parquet(path: Path, task: Task) -> None:
    """The prompts in verl's columns. verl tells the samples of a group by the prompt's `index`."""
    import pyarrow
    import pyarrow.parquet

    rows = [row | {"extra_info": {"index": index}} for index, row in enumerate(rows_of(task))]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def run_verl(task: Task, settings: dict[str, Any], prompts: Path, started_at: float, until: float) -> Results:
    """Train until all steps are done or the time is `until`. Returns the figures of the steps."""
    if find_spec("trl") is not None:
        raise SystemExit("verl ends with TRL 1 in its environment: run this part without TRL on the path")
    write_parquet(prompts, task)
    log, metrics = prompts.with_name("verl.log"), prompts.with_name("metrics.jsonl")
    environment = os.environ | {
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_DISABLE_COMPILE_CACHE": "0",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with GpuSamples() as gpu, log.open("w") as output:
        steps = StepLog(task, gpu, started_at)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments_of(settings)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _watch(process, steps, metrics, until)
        finally:
            if len(steps.tokens) < task.num_steps:
                print_end(log)
            stop(process, STOP_S)
    return steps.finish()


def _watch(process: subprocess.Popen[bytes], steps: StepLog, metrics: Path, until: float) -> None:
    """Record each step as soon as its metrics are written, which is the last that verl does in a step."""
    task = steps.task
    while len(steps.tokens) < task.num_steps and time.time() < until:
        has_ended = process.poll() is not None
        rows = step_rows(metrics)
        at = time.time()
        for row in rows[len(steps.tokens) : task.num_steps]:
            steps.add(at, tokens_of(row, task), phases_of(row))
        if has_ended:
            break
        time.sleep(POLL_S)


def step_rows(path: Path) -> list[dict[str, float]]:
    """The metrics of each step, from the whole lines of verl's file."""
    text = path.read_text() if path.exists() else ""
    rows = [json.loads(line)["data"] for line in text[: text.rfind("\n") + 1].splitlines()]
    return [row for row in rows if "timing_s/step" in row]


def tokens_of(row: dict[str, float], task: Task) -> float:
    """Response tokens of a step."""
    return row["response_length/mean"] * task.num_sequences


def phases_of(row: dict[str, float]) -> dict[str, float]:
    """Seconds of a step's phases by verl's own timers."""
    phases = {ours: row.get(f"timing_s/{theirs}", 0.0) for theirs, ours in PHASES.items()}
    return phases | {"rest": row["timing_s/step"] - sum(phases.values())}


def print_end(log: Path) -> None:
    """The first errors in verl's log, which are often those of another process, and its end. The folder is gone
    afterwards."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines[:-LAST_LINES] if "Error" in line][:FIRST_ERRORS]
    print("--- the first errors of verl's log", *errors, sep="\n", file=sys.stderr)
    print("--- the end of verl's log", *lines[-LAST_LINES:], sep="\n", file=sys.stderr, flush=True)
