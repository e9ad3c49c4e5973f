"""Converters of single values of verl to ours, by the names that keys.csv has for them. None sets nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.algorithms import LOSS_NAMES

NO_RESUME = "verl's checkpoints cannot be read: merge one to a Hugging Face folder and set model.path"
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "half": "float16", "auto": "bfloat16"}
_LOGGERS = {"console": "console", "wandb": "wandb", "tensorboard": "tensorboard", "file": "jsonl"}
_PENALTIES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
OWN = "write it as your own, in a file: docs/algorithms.md#your-own-advantage-or-loss"


@dataclass(frozen=True)
class Replaced:
    """A value without counterpart, and what is set instead of it."""

    value: Any
    reason: str


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def local_path(value: Any) -> str:
    """A path, with `~` replaced by the home folder."""
    text = str(value)
    return str(Path(text).expanduser()) if text.startswith("~") else text


def files(value: Any) -> Any:
    found = [local_path(entry) for entry in listed(value)]
    return found[0] if len(found) == 1 else found


def _run_name(value: Any) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", str(value).lower()).strip("-_")[:63] or "verl-run"


def _dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.")
    return _DTYPES.get(name, name if name in _DTYPES.values() else "bfloat16")


def _count(value: Any) -> int | None:
    """A number above 0. verl's 0 and -1 stand for none."""
    return int(value) if value and int(value) > 0 else None


def _resume(value: Any) -> Any:
    return Replaced("auto", NO_RESUME) if value == "resume_path" else "off" if value == "disable" else "auto"


def _loggers(value: Any) -> Any:
    names = [str(name) for name in listed(value)]
    ours = list(dict.fromkeys([*(_LOGGERS[name] for name in names if name in _LOGGERS), "jsonl"]))
    others = ", ".join(name for name in names if name not in _LOGGERS)
    return Replaced(ours, f"{others}: loggers are console, jsonl, tensorboard and wandb") if others else ours


def _steps(value: Any) -> list[int] | None:
    return [int(step) for step in value if int(step) >= 1] if isinstance(value, list) and value else None


def kl_penalty(value: Any) -> Any:
    ours = _PENALTIES.get(str(value).removesuffix("+"))
    if ours is None:
        return Replaced("k3", "replaced by k3, the low-variance estimator")
    if str(value).endswith("+"):
        return Replaced(ours, f"replaced by {ours}: the gradient is that of the estimator itself, not of k2")
    return ours


def _choice(names: Mapping[str, Any], other: Any, reason: str) -> Callable[[Any], Any]:
    """A converter of these names. Other names are replaced by `other`."""
    return lambda value: names[str(value)] if str(value) in names else Replaced(other, reason)


_LOSSES = {name: name for name in LOSS_NAMES if name not in ("ppo", "reinforce")}
_LOSSES |= {name.replace("_", "-"): name for name in _LOSSES}
CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "=": lambda value: value,
    "tree": lambda value: value or None,
    "int": int,
    "float": float,
    "bool": bool,
    "count": _count,
    "share": lambda value: 1.0 if value else 0.0,
    "top_k": lambda value: max(0, int(value)),
    "megabytes": lambda value: int(value) * 2**20,
    "path": local_path,
    "folder": lambda value: local_path(value) or None,
    "files": files,
    "run_name": _run_name,
    "dtype": _dtype,
    "master": lambda value: "bfloat16" if _dtype(value) == "bfloat16" else None,
    "resume": _resume,
    "loggers": _loggers,
    "steps": _steps,
    "ground_truth": lambda value: f"{value}.ground_truth",
    "kept_side": lambda value: {"left": "head", "right": "tail"}.get(str(value), "both"),
    "loss": _choice({"vanilla": "ppo"} | _LOSSES, "ppo", f"replaced by ppo; {OWN}"),
    "schedule": _choice(
        {name: name for name in ("constant", "linear", "cosine")}, "constant",
        "replaced by constant; schedules are constant, linear and cosine",
    ),
    "engine": _choice(
        {"vllm": "vllm", "sglang": "sglang", "hf": "torch"}, "auto",
        "replaced by auto: engines are vllm, sglang and torch",
    ),
    "quantization": _choice({"fp8": "fp8"}, None, "rollout.engine.quantization takes fp8 only"),
    "tool_format": _choice(
        {name: name for name in ("hermes", "llama3_json", "openai")}, None,
        "write a parser: rollout.agents.tool_format (docs/agents.md)",
    ),
    "too_long": _choice(
        {"error": "error", "right": "cut"}, "drop",
        "rows that are too long are skipped: only their end can be cut (right)",
    ),
}  # fmt: skip
