"""Runs each logger of a run in a separate thread, so that none can delay or end training.

    controller ─ log(metrics) ─► queue of MAX_WAITING calls ─► thread: open, log, log, …, close

A logger that raises, or whose queue is full because it hangs, gets no more steps; one line says so. When the run ends,
the controller waits for the loggers until a deadline. To add a logger, write a class below, and add its name to
`penstock/config/learner.py` and to `_open`.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config.learner import LoggerName
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.samples import Sample
from penstock.step_history import METRICS, read_steps

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)


class StepLogger:
    """A logger is made, called and closed in one separate thread, so it may be slow. An error ends only the logger. It
    is made for the steps after `start_step`. An earlier logger of the run may have logged some of them already."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write the numbers of one step, under the learner's own names. `step` is one of them."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write some samples of a step or of a validation, the worst first. `samples.jsonl` has all of them."""

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Write the scores of finished validations of `step`, which may be some steps ago, under verl's names."""

    def close(self) -> None:
        """Called when no step follows."""


MAX_WAITING = 1000
CLOSE_S = 10.0
"""How long all loggers together may take to write their last steps."""
NEEDED_PACKAGES = ("tensorboard", "wandb")
"""Loggers that need a package of their name."""


def check_loggers(names: Sequence[LoggerName]) -> None:
    """Raise ConfigError if a logger's package is not installed. Does not import the packages."""
    for name in names:
        if name in NEEDED_PACKAGES and find_spec(name) is None:
            raise ConfigError(f"learner.loggers has {name}, which needs a package: pip install {name}")


def open_loggers(config: RunConfig, start_step: int) -> StepLoggers:
    """Start the loggers of `learner.loggers`, for the steps after `start_step`."""
    names = dict.fromkeys(config.learner.loggers)
    return StepLoggers([LoggerThread(name, partial(_open, name, config, start_step)) for name in names])


class LoggerThread:
    """One logger and its thread, which also makes it: that may call a server that does not answer."""

    def __init__(self, name: str, make_logger: Callable[[], StepLogger]) -> None:
        self.name = name
        self.make_logger = make_logger
        self.waiting: queue.Queue[Callable[[StepLogger], None] | None] = queue.Queue(MAX_WAITING)
        self.is_dropped = False
        self.thread = threading.Thread(target=self._run, name=f"logger-{name}", daemon=True)

    def call(self, call: Callable[[StepLogger], None] | None) -> None:
        """Queue a call of the logger, without waiting. None means that none follows."""
        if self.is_dropped:
            return
        try:
            self.waiting.put_nowait(call)
        except queue.Full:
            self.is_dropped = True
            logger.error(
                "logger %s is %d steps behind and gets no more steps; training continues", self.name, MAX_WAITING
            )

    def _run(self) -> None:
        try:
            opened = self.make_logger()
            while (call := self.waiting.get()) is not None:
                call(opened)
            opened.close()
        except Exception as error:  # a third party's package may raise anything
            self.is_dropped = True
            logger.error("logger %s failed and gets no more steps; training continues: %r", self.name, error)


class StepLoggers:
    """Sends the numbers of each step, tables of samples, and scores of validations to every logger."""

    def __init__(self, threads: Sequence[LoggerThread]) -> None:
        self.threads = threads
        for each in threads:
            each.thread.start()

    def log(self, metrics: Mapping[str, float]) -> None:
        copy = dict(metrics)
        self._call(lambda opened: opened.log(copy))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._call(lambda opened: opened.log_samples(step, samples))

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        self._call(lambda opened: opened.log_validation(step, scores))

    def _call(self, call: Callable[[StepLogger], None] | None) -> None:
        for each in self.threads:
            each.call(call)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until all loggers have written their last step, or until the deadline."""
        deadline = time.monotonic() + timeout_s
        self._call(None)
        for each in self.threads:
            each.thread.join(max(0.0, deadline - time.monotonic()))
            if each.thread.is_alive():
                logger.error("logger %s did not end in %.0f s; its last steps may be missing", each.name, timeout_s)


def _open(name: LoggerName, config: RunConfig, start_step: int) -> StepLogger:
    if name == "jsonl":
        return JsonlLogger(config.folder, start_step)
    if name == "tensorboard":
        return TensorBoardLogger(config.folder / "tensorboard", start_step)
    if name == "wandb":
        return WandbLogger(config)
    from rich.console import Console

    return ConsoleLogger(Console())


SPREADS = {
    "reward": "critic/rewards", "advantage": "critic/advantages", "return": "critic/returns",
    "response_length": "response_length", "prompt_length": "prompt_length", "num_turns": "num_turns",
    "value": "critic/values",
}  # fmt: skip
"""Numbers with a mean, a minimum and a maximum, and verl's names for them."""
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
    "value_explained_variance": "critic/vf_explained_var",
    **{f"{own}_{kind}": f"{name}/{kind}" for own, name in SPREADS.items() for kind in ("mean", "min", "max")},
    "truncated_ratio": "response_length/clip_ratio",
    "memory_peak_gib": "perf/max_memory_allocated_gb",
    "memory_reserved_gib": "perf/max_memory_reserved_gb",
    "host_memory_gib": "perf/cpu_memory_used_gb",
    "mfu": "perf/mfu/actor",
    "kl_behaviour": "rollout_corr/k3_kl",
    "importance_weight_mean": "rollout_corr/rollout_is_mean",
    "importance_weight_max": "rollout_corr/rollout_is_max",
    "is_truncated_ratio": "rollout_corr/rollout_is_ratio_fraction_high",
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
    "critic/score/mean": lambda m: m["reward_mean"],
    "critic/score/min": lambda m: m["reward_min"],
    "critic/score/max": lambda m: m["reward_max"],
    "perf/time_per_step": lambda m: m["step_s"],
    "actor/pg_clipfrac": lambda m: m["clip_ratio_low"] + m["clip_ratio_high"],
    "training/off_policy/trajectory_staleness_worst/max": lambda m: m["staleness_max"],
    "perf/total_num_tokens": lambda m: m["prompt_tokens"] + m["response_tokens"],
    "perf/throughput": lambda m: (m["prompt_tokens"] + m["response_tokens"]) / m["step_s"] / max(1, m["num_gpus"]),
    "timing_per_token_ms/gen": lambda m: 1000 * m["wait_s"] / m["response_tokens"],
    "timing_per_token_ms/update_actor": lambda m: 1000 * m["update_s"] / (m["prompt_tokens"] + m["response_tokens"]),
}


def under_verl_names(metrics: Metrics) -> dict[str, float]:
    """Every number under verl's name or `penstock/…`, and what verl has under a second name or derives from several.
    Names with a slash, as those of supervised fine-tuning (`train/loss`), are verl's already. Estimators without
    returns have the advantages as returns in verl."""
    shared = {f"return_{kind}": f"advantage_{kind}" for kind in ("mean", "min", "max")}
    metrics = {returned: metrics[name] for returned, name in shared.items() if name in metrics} | dict(metrics)
    named = {
        name if "/" in name else VERL_NAMES.get(name, OWN_PREFIX + name): value
        for name, value in metrics.items()
        if name != "time"
    }
    is_supervised = any("/" in name for name in metrics)
    return named | ({} if is_supervised else {name: derive(metrics) for name, derive in _DERIVED.items()})


COLUMNS = (
    "step", "prompt_id", "sample", "data_source", "reward", "reward_parts", "prompt", "response", "ground_truth",
    "num_tokens", "min_version", "max_version", "finish_reason", "server_id",
)  # fmt: skip
MAX_TEXT = 4000
"""Characters of a text that a table has. `samples.jsonl` has the whole text."""


def table_name(samples: Sequence[Sample]) -> str:
    return "validation_samples" if samples[0].validation else "samples"


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
    blocks = [
        f"{name}:\n\n" + "\n".join(f"    {line}" for line in _text(value).splitlines()) for name, value in texts.items()
    ]
    return "\n\n".join([head, *blocks])


def _cell(value: Any) -> Any:
    """Numbers stay numbers. Everything else becomes text, because a column of a table may have one type only."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"


def _text(value: Any) -> str:
    return "" if value is None else str(_cell(value))


class JsonlLogger(StepLogger):
    """Writes one line per step, with the learner's own names, and flushes it at once. When a run continues, lines of
    steps after `start_step` are dropped: they are trained again."""

    def __init__(self, folder: Path, start_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        partial = path.with_suffix(".partial")
        partial.write_text("".join(_line(step) for step in read_steps(folder) if step["step"] <= start_step))
        partial.rename(path)
        self._file = path.open("a", buffering=1)

    def log(self, metrics: Mapping[str, float]) -> None:
        self._file.write(_line(metrics))

    def close(self) -> None:
        self._file.close()


def _line(metrics: Mapping[str, float]) -> str:
    """The line of a step. Numbers that are not finite, as in a skipped step, become null: JSON cannot express them."""
    numbers = {name: _rounded(value) if math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps(numbers, allow_nan=False) + "\n"


def _rounded(value: float) -> float:
    """Seven digits, which is what float32 has. Times and large counts keep all digits up to a thousandth."""
    return float(f"{value:.7g}") if abs(value) < 1e6 else round(value, 3)


class ConsoleLogger(StepLogger):
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

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        from rich.text import Text

        self.console.print(Text(f"validation at step {step}: " + "  ".join(f"{n} {v:.4g}" for n, v in scores.items())))


FLUSH_S = 10


class TensorBoardLogger(StepLogger):
    """Writes event files to a folder. When a run continues, steps after `start_step` replace those written before."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1, flush_secs=FLUSH_S)

    def log(self, metrics: Mapping[str, float]) -> None:
        for name, value in under_verl_names(metrics).items():
            self._writer.add_scalar(name, value, int(metrics["step"]), walltime=metrics["time"])

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._writer.add_text(table_name(samples), markdown(samples), step)

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        for name, value in scores.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


SECTIONS = {"run", "seed", "model", "replay", "learner"}
"""Sections of the configuration that are sent to W&B. The others hold addresses and credentials."""
VALIDATION_STEP = f"{VALIDATION}step"


class WandbLogger(StepLogger):
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
        self._run.log({table_name(samples): table}, commit=False)

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Add the scores to the newest step, with the step that they belong to."""
        self._run.log({VALIDATION_STEP: step, **scores}, commit=False)

    def close(self) -> None:
        self._run.finish()
