"""verl's keys: the table in keys.csv, which the import, its report and docs/verl-keys.md are made from, and the values
of a run.

Columns of keys.csv: `verl`, a dotted name in which `*` stands for any text; `kind`; `ours`, our fields; `convert`, the
converter that sets the first of them, empty if it is computed from several keys; `default`, verl's default, or for a
key without counterpart the values that ask for nothing, its default first; `note`.

| kind     | meaning                                                                                        |
|----------|------------------------------------------------------------------------------------------------|
| set      | our fields are set from it; a note says what differs                                           |
| unneeded | nothing is lost without it                                                                     |
| missing  | there is no counterpart; the note says why, or what to do                                      |
| changed  | nothing is set; `ours` serves the purpose in another way, which the note says                  |
| danger   | the same, and without it the run trains on something else, or not at all                       |
| alias    | another name, in older or newer versions, of the key in `ours`; both end with `*`: of all below |
"""

from __future__ import annotations

import csv
import fnmatch
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.algorithms import LOSS_NAMES
from penstock.config.loading import parse_value
from penstock.config.run import RunConfig
from penstock_tools.verl_import.hydra import HydraConfig

# ── converters of single values, by the names that keys.csv has for them; None sets nothing ──


_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "half": "float16", "auto": "bfloat16"}
_LOGGERS = {"console": "console", "wandb": "wandb", "tensorboard": "tensorboard", "file": "jsonl"}
_PENALTIES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
OWN = "write it as your own, in a file: docs/algorithms.md#your-own-advantage-or-loss"


@dataclass(frozen=True)
class Replaced:
    """A value without counterpart, and what is set instead of it."""

    value: Any
    reason: str


def is_same(left: Any, right: Any) -> bool:
    """Whether values are equal and of one kind: 1 is 1.0, but not true."""
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def local_path(value: Any) -> str:
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
    "offload": lambda value: "all" if value else "none",
    "share": lambda value: 1.0 if value else 0.0,
    "top_k": lambda value: max(0, int(value)),
    "rows": lambda value: min(int(value), 1000) or None,
    "megabytes": lambda value: int(value) * 2**20,
    "path": local_path,
    "folder": lambda value: local_path(value) or None,
    "files": files,
    "run_name": _run_name,
    "dtype": _dtype,
    "master": lambda value: "bfloat16" if _dtype(value) == "bfloat16" else None,
    "resume": lambda value: "off" if value == "disable" else "auto",
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


@dataclass(frozen=True)
class VerlKey:
    section: str
    verl: str
    kind: str
    ours: tuple[str, ...]
    convert: str
    default: Any
    harmless: tuple[Any, ...]
    """Values of a key without counterpart that ask for nothing."""
    note: str


def _read(section: str, verl: str, kind: str, ours: str, convert: str, default: str, note: str) -> VerlKey:
    value = parse_value(default) if default else None
    harmless = (*(value or ()), None) if kind in ("missing", "changed", "danger") else ()
    return VerlKey(
        section, verl, kind, tuple(ours.split()), convert, harmless[0] if harmless else value, harmless, note
    )


with (Path(__file__).parent / "keys.csv").open(newline="") as _file:
    ALL_KEYS = [_read(**row) for row in csv.DictReader(_file)]


def _rows(*sections: str) -> tuple[VerlKey, ...]:
    """The rows of these sections, of which the first that has a key wins."""
    rows: dict[str, VerlKey] = {}
    for section in sections:
        for row in ALL_KEYS:
            if row.section == section:
                rows.setdefault(row.verl, row)
    return tuple(rows.values())


_TRAINING = _rows("trainer", "data", "rewards", "rollout", "policy")
KEYS_BY_PROGRAM: dict[str, tuple[VerlKey, ...]] = {
    "ppo": _TRAINING,
    "dapo": _TRAINING,
    "generation": _rows("generation"),
    "generation_server": _rows("generation_server", "generation"),
    "eval": _rows("evaluation"),
    "sft": _rows("sft"),
    "fsdp_sft": _rows("fsdp_sft", "sft"),
}
"""In the order in which keys are looked up: narrow patterns before wide ones."""


@functools.cache
def find_key(program: str, name: str) -> VerlKey | None:
    """The row of a key: its own, or that of the first pattern it matches. None if the table does not have it."""
    rows = KEYS_BY_PROGRAM[program]
    exact = next((row for row in rows if row.verl == name), None)
    return exact or next((row for row in rows if "*" in row.verl and fnmatch.fnmatchcase(name, row.verl)), None)


def canonical_name(program: str, name: str) -> str:
    """The name of a key in the table, for one that is given by an older or newer name."""
    row = find_key(program, name)
    if row is None or row.kind != "alias":
        return name
    stem = row.verl.removesuffix("*")
    return canonical_name(program, row.ours[0].removesuffix("*") + (name[len(stem) :] if stem != row.verl else ""))


def default_of(program: str, name: str) -> Any:
    row = find_key(program, name)
    return None if row is None else row.default


# ── the values of a run ──


VERDICTS = {
    "danger": "Danger: what is trained or measured is not what verl trains and measures",
    "missing": "No counterpart: decide what to do about these",
    "changed": "Changed meaning: check these",
    "unneeded": "Not needed here",
}
"""The verdicts on keys, besides that they mean the same, in the order of the report, with their headings."""
TEXT_ONLY = "only text is trained"
"""Begins the reason of every key that asks for images, videos or sound."""
_DECISIVE = ("adv_estimator", "loss_mode", "reward_manager", "default_agent_loop", "model.path", "val_kwargs.n")
"""Ends of the keys whose value decides what is trained or measured. Other values without counterpart are missing."""


@dataclass
class Findings:
    """What the user should know."""

    keys: dict[str, list[tuple[str, Any, str]]] = field(default_factory=lambda: {name: [] for name in VERDICTS})
    """By verdict: each entry is a verl key, its value, and a sentence."""
    notes: list[str] = field(default_factory=list)
    num_same: int = 0
    """Keys that mean the same here, or ask for nothing."""


class Values:
    """verl's values by key, and our fields as they are set."""

    def __init__(self, config: HydraConfig, program: str) -> None:
        self.program = program
        self.given: dict[str, Any] = {}
        self.original: dict[str, str] = {}
        """The name under which each key was given."""
        self.fields: dict[str, Any] = {}
        """Our configuration, as nested mappings."""
        self.findings = Findings(notes=list(config.notes))
        self._reasons: dict[str, tuple[str, str]] = {}
        self._without_effect: tuple[str, ...] = ()
        default = functools.partial(default_of, program)
        for name, raw in config.values.items():
            canonical = canonical_name(program, name)
            value = config.resolve(raw, default)
            if value == "???":  # a value that Hydra wants to be given, and that is not
                continue
            if canonical != name and value is None:
                self.findings.num_same += 1
                continue
            if canonical in self.given:
                self.findings.num_same += 1
            self.given.pop(canonical, None)
            self.given[canonical] = value
            self.original[canonical] = name

    def get(self, name: str) -> Any:
        """The value of a key, or verl's default."""
        value = self.given.get(name)
        return default_of(self.program, name) if value is None else value

    def is_given(self, name: str) -> bool:
        return self.given.get(name) is not None

    def below(self, prefix: str) -> dict[str, Any]:
        """The given keys below a prefix, without the prefix, as nested mappings."""
        tree: dict[str, Any] = {}
        for name, value in self.given.items():
            if name.startswith(f"{prefix}.") and value is not None:
                _put(tree, name.removeprefix(f"{prefix}."), value)
        return tree

    def set(self, name: str, value: Any) -> None:
        _put(self.fields, name, value)

    def ours(self, name: str) -> Any:
        """The field as it was set, or our default."""
        value = look_up(self.fields, name)
        return look_up(_our_defaults(), name) if value is None else value

    def lose(self, name: str, reason: str) -> None:
        """Report a given key as one without counterpart, because its value has none."""
        if name in self.given:
            self._reasons[name] = ("danger" if name.endswith(_DECISIVE) else "missing", reason)

    def ignore(self, *prefixes: str) -> None:
        """Keys that have no effect in this run: those of a part of verl that it does not use."""
        self._without_effect += prefixes

    def converted(self, name: str, convert: Any) -> Any:
        """The converted value of a key. A value that is replaced is reported as one without counterpart."""
        ours = convert(self.get(name))
        if isinstance(ours, Replaced):
            self.lose(name, ours.reason)
            return ours.value
        return ours

    def set_direct(self, *skipped: str) -> None:
        """Set the fields of keys that have a converter, except keys that begin with `skipped`. What is not given
        and the same by default is not written."""
        for row in KEYS_BY_PROGRAM[self.program]:
            if not row.convert or row.verl.startswith(skipped):
                continue
            if row.convert == "tree":
                ours: Any = self.below(row.verl.removesuffix(".*")) or None
            else:
                ours = None if self.get(row.verl) is None else self.converted(row.verl, CONVERTERS[row.convert])
            is_needed = self.is_given(row.verl) or row.note or not is_same(ours, look_up(_our_defaults(), row.ours[0]))
            if ours is not None and is_needed:
                self.set(row.ours[0], ours)

    def classify(self) -> None:
        """Sort every given key into the findings."""
        for name, value in self.given.items():
            verdict, reason = self._verdict(name, value)
            if verdict == "same":
                self.findings.num_same += 1
            else:
                self.findings.keys[verdict].append((self.original[name], value, reason))

    def _verdict(self, name: str, value: Any) -> tuple[str, str]:
        row = find_key(self.program, name)
        if value in (None, "", {}, []) or name.startswith(self._without_effect):
            return "same", ""
        if name in self._reasons:
            return self._reasons[name]
        if row is None:
            return "missing", "this key is not known"
        if row.kind == "set" and row.note:
            set_to = [(field, look_up(self.fields, field)) for field in row.ours]
            ours = ", ".join(field if value is None else f"{field}: {value}" for field, value in set_to)
            return "changed", f"{ours}; {row.note}"
        is_harmless = row.kind == "set" or any(is_same(value, each) for each in row.harmless)
        return ("same" if is_harmless else row.kind), row.note


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        inner = tree.get(section)
        tree[section] = inner if isinstance(inner, dict) else {}
        tree = tree[section]
    tree[last] = value


def look_up(tree: dict[str, Any], name: str) -> Any:
    found: Any = tree
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return None if isinstance(found, dict) else found


@functools.cache
def _our_defaults() -> dict[str, Any]:
    return RunConfig.model_validate({"model": {"path": "none"}}).model_dump(mode="json")
