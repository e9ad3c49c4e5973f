"""TRL's side of the whole runs: `GRPOTrainer` with vLLM in the same process (`vllm_mode="colocate"`).

Written for TRL 1.16.0. Everything that is not set here has TRL's default: among others the correction for the
difference between vLLM's log-probs and the trainer's, for which it computes the log-probs of the samples once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from harness import GpuSamples, Results, say
from whole_run_parts.reward import compute_score
from whole_run_parts.steps import StepLog
from whole_run_parts.task import Task

VLLM_MEMORY = 0.35


def settings_of(task: Task, folder: Path, engine: str, rows: int, recomputed: bool) -> GRPOConfig:
    """`rows` sequences in a forward and backward pass. One optimizer step over all samples of a step."""
    is_gpu = engine == "vllm"
    lengths = {"ignore_eos": True} if is_gpu else {"min_new_tokens": task.response_tokens}
    vllm: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": VLLM_MEMORY,
        "vllm_max_model_length": task.max_tokens,
    }
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=task.num_sequences // rows,
        num_generations=task.num_samples,
        max_completion_length=task.response_tokens,
        generation_kwargs=lengths,
        temperature=1.0,
        beta=0.0,
        max_steps=task.num_steps,
        learning_rate=task.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=is_gpu,
        use_cpu=not is_gpu,
        gradient_checkpointing=recomputed,
        model_init_kwargs={"dtype": "bfloat16" if is_gpu else "float32"},
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
        **(vllm if is_gpu else {}),
    )


def vowels(completions: list[str], **_: Any) -> list[float]:
    """The same reward as ours."""
    return [compute_score("", text, "") for text in completions]


class StepTimes(TrainerCallback):  # type: ignore[misc]
    """Records the end of each step, when the GPU has done its work, and ends the run at `until`."""

    def __init__(self, steps: StepLog, until: float) -> None:
        self.steps = steps
        self.until = until
        self.seconds: dict[str, float] = {}
        self.tokens = 0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose seconds count as the phase `name` of a step."""
        self.seconds[name] = 0.0

        def wrapped(*arguments: Any, **settings: Any) -> Any:
            started = time.perf_counter()
            result = call(*arguments, **settings)
            _wait()
            self.seconds[name] += time.perf_counter() - started
            return result

        return wrapped

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, a generation that returns the responses as its second value."""

        def wrapped(*arguments: Any, **settings: Any) -> Any:
            result = call(*arguments, **settings)
            self.tokens += sum(len(response) for response in result[1])
            return result

        return wrapped

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        _wait()
        self.steps.add(time.time(), self.tokens, dict(self.seconds))
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.tokens = 0
        if time.time() >= self.until:
            control.should_training_stop = True
        return control


def run_trl(task: Task, model: Path, settings: GRPOConfig, started_at: float, until: float) -> Results:
    """Train until all steps are done or the time is `until`. Returns the figures of the steps."""
    with GpuSamples() as gpu:
        steps = StepLog(task, gpu, started_at)
        times = StepTimes(steps, until)
        trainer: Any = GRPOTrainer(
            model=str(model),
            reward_funcs=vowels,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": text} for text in task.prompts()]),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[times],
        )
        say("TRL's trainer is ready")
        if settings.use_vllm:
            generation = trainer.vllm_generation
            generation.generate = times.timed("generate", times.counted(generation.generate))
            generation.sync_weights = times.timed("push", generation.sync_weights)
        else:
            trainer._generate = times.timed("generate", times.counted(trainer._generate))
        trainer.train()
    return steps.finish()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
