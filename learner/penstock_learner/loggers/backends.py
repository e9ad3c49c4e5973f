"""The loggers of `learner.loggers`: `metrics.jsonl`, the terminal, TensorBoard and Weights & Biases.

All but `metrics.jsonl` use verl's names, so that existing dashboards work. docs/metrics.md has the table, and says
where a number differs slightly from verl's. TensorBoard needs the package `tensorboard`, and W&B the package `wandb`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config.run import RunConfig
from penstock.samples import Sample

if TYPE_CHECKING:
    from rich.console import Console

VERL_NAMES = {
    "step": "training/global_step",
    "loss": "actor/pg_loss",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "approx_kl": "actor/ppo_kl",
    "dual_clip_ratio": "actor/pg_clipfrac_lower",
    "kl_loss": "actor/kl_loss",
    "kl_coefficient": "actor/kl_coef",
    "lr": "actor/lr",
    "critic_loss": "critic/vf_loss",
    "critic_grad_norm": "critic/grad_norm",
    "critic_lr": "critic/lr",
    "critic_clip_ratio": "critic/vf_clipfrac",
    "value_mean": "critic/vpred_mean",
    "value_explained_variance": "critic/vf_explained_var",
    "reward_mean": "critic/rewards/mean",
    "reward_min": "critic/rewards/min",
    "reward_max": "critic/rewards/max",
    "response_length_mean": "response_length/mean",
    "kl_behaviour": "rollout_corr/k3_kl",
    "importance_weight_mean": "rollout_corr/rollout_is_mean",
    "importance_weight_max": "rollout_corr/rollout_is_max",
    "is_rejected_ratio": "rollout_corr/rollout_rs_masked_fraction",
    "effective_sample_ratio": "rollout_corr/rollout_is_eff_sample_size",
    "step_s": "timing_s/step",
    "wait_s": "timing_s/gen",
    "update_s": "timing_s/update_actor",
    "gather_s": "timing_s/update_weights",
}
VALIDATION = "val-core/"
"""Prefix of the scores of validations: `val-core/NAME/reward/mean`."""
OWN_PREFIX = "penstock/"
"""Prefix of numbers for which verl has no name."""

Metrics = Mapping[str, float]

_DERIVED: dict[str, Callable[[Metrics], float]] = {
    "actor/pg_clipfrac": lambda m: m["clip_ratio_low"] + m["clip_ratio_high"],
    "prompt_length/mean": lambda m: m["prompt_tokens"] / m["num_sequences"],
    "perf/total_num_tokens": lambda m: m["prompt_tokens"] + m["response_tokens"],
    "perf/throughput": lambda m: (m["prompt_tokens"] + m["response_tokens"]) / m["step_s"],
}
_NOT_LOGGED = ("time",)


def under_verl_names(metrics: Metrics) -> dict[str, float]:
    """Return every number once, under verl's name or `penstock/…`, and the numbers that verl derives from several.

    Names with a slash, as those of supervised fine-tuning (`train/loss`), are verl's already."""
    named = {_verl_name(name): value for name, value in metrics.items() if name not in _NOT_LOGGED}
    is_supervised = any("/" in name for name in metrics)
    return named | ({} if is_supervised else {name: derive(metrics) for name, derive in _DERIVED.items()})


def _verl_name(name: str) -> str:
    return name if "/" in name else VERL_NAMES.get(name, OWN_PREFIX + name)


COLUMNS = (
    "step", "prompt_id", "sample", "data_source", "reward", "reward_parts", "prompt", "response", "ground_truth",
    "num_tokens", "min_version", "max_version", "finish_reason", "server_id",
)  # fmt: skip
MAX_TEXT = 4000
"""Characters of a text that a table has. `samples.jsonl` has the whole text."""


def table_rows(samples: Sequence[Sample]) -> list[list[Any]]:
    """One row per sample, with the values of COLUMNS. Nested values become JSON."""
    return [
        [_text(sample.ground_truth) if name == "ground_truth" else _cell(getattr(sample, name)) for name in COLUMNS]
        for sample in samples
    ]


def markdown(samples: Sequence[Sample]) -> str:
    """A section per sample. Texts are indented, so that nothing in them is read as Markdown."""
    return "\n\n".join(_section(sample) for sample in samples)


def _section(sample: Sample) -> str:
    parts = "".join(f" · {name} {value:g}" for name, value in sample.reward_parts.items() if value is not None)
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    head = f"**reward {reward}**{parts} · prompt {sample.prompt_id}.{sample.sample} · {sample.num_tokens} tokens"
    texts = {"prompt": sample.prompt, "ground truth": sample.ground_truth, "response": sample.response}
    blocks = [f"{name}:\n\n{_indented(_text(value))}" for name, value in texts.items()]
    return "\n\n".join([head, *blocks])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _cell(value: Any) -> Any:
    """Numbers stay numbers. Everything else becomes text, because a column of a table may have one type only."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"


def _text(value: Any) -> str:
    return "" if value is None else str(_cell(value))


class JsonlLogger:
    """Writes one line per step, with the learner's own names, and flushes it at once.

    When a run resumes, the lines of steps after `resume_step` are dropped: they are trained again."""

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = []
        if path.is_file():
            for line in path.read_text().splitlines():
                try:
                    if json.loads(line)["step"] <= resume_step:
                        kept.append(line + "\n")
                except (ValueError, KeyError):
                    continue
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.rename(path)
        self._file = path.open("a", buffering=1)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write the step. Numbers that are not finite, as in a skipped step, become null: JSON cannot express them."""
        line = {name: _rounded(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Does nothing: `samples.jsonl` has them."""

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Does nothing: `validation.jsonl` has them."""

    def close(self) -> None:
        self._file.close()


def _rounded(value: float) -> float:
    """Seven digits, which is what float32 has. Times and large counts keep all digits up to a thousandth."""
    return float(f"{value:.7g}") if abs(value) < 1e6 else round(value, 3)


class ConsoleLogger:
    """Prints a row for each group of names, for example `actor  pg_loss 0.012  entropy 0.41 …`."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def log(self, metrics: Mapping[str, float]) -> None:
        from rich.table import Table
        from rich.text import Text

        groups: dict[str, list[str]] = {}
        for name, value in sorted(under_verl_names(metrics).items()):
            group, _, rest = name.partition("/")
            groups.setdefault(group, []).append(f"{rest} {value:.4g}")
        title = f"step {metrics['step']:.0f}"
        table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
        for group, values in groups.items():
            table.add_row(Text(group, style="bold"), Text("  ".join(values)))
        self.console.print(table)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Does nothing: `penstock samples` shows them."""

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        from rich.text import Text

        self.console.print(Text(f"validation at step {step}: " + "  ".join(f"{n} {v:.4g}" for n, v in scores.items())))

    def close(self) -> None:
        """Does nothing: the terminal stays open."""


FLUSH_S = 10


class TensorBoardLogger:
    """Writes event files to a folder. When a run resumes, steps after `resume_step` replace those written before."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1, flush_secs=FLUSH_S)

    def log(self, metrics: Mapping[str, float]) -> None:
        for name, value in under_verl_names(metrics).items():
            self._writer.add_scalar(name, value, int(metrics["step"]), walltime=metrics["time"])

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._writer.add_text("samples", markdown(samples), step)

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        for name, value in scores.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


SECTIONS = {"run", "seed", "model", "replay", "learner"}
"""Sections of the configuration that are sent to W&B. The others hold addresses and credentials."""
VALIDATION_STEP = f"{VALIDATION}step"


class WandbLogger:
    """The W&B run keeps its id through restarts. If a step is logged twice, W&B keeps the first value."""

    def __init__(self, config: RunConfig) -> None:
        import wandb

        self._wandb = wandb
        settings = config.learner.wandb
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity or None,
            id=config.run,
            name=config.run,
            dir=str(config.folder),
            mode=settings.mode,
            resume="allow",
            config=config.model_dump(mode="json", include=SECTIONS),
        )
        self._run.define_metric(f"{VALIDATION}*", step_metric=VALIDATION_STEP)

    def log(self, metrics: Mapping[str, float]) -> None:
        self._run.log(under_verl_names(metrics), step=int(metrics["step"]))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Add a table to the newest step. W&B refuses values of earlier steps."""
        table = self._wandb.Table(columns=list(COLUMNS), data=table_rows(samples))
        self._run.log({"samples": table}, commit=False)

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Add the scores to the newest step, with the step that they belong to."""
        self._run.log({VALIDATION_STEP: step, **scores}, commit=False)

    def close(self) -> None:
        self._run.finish()
