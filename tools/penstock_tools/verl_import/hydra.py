"""Reads what Hydra reads: YAML files with `defaults`, overrides on the command line, and interpolations."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from penstock.config.loading import merged, parse_value
from penstock.errors import ConfigError, one_line

OWN_CONFIGS = frozenset(
    ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer", "ppo_trainer_split", "generation",
     "evaluation")
)  # fmt: skip
"""Configs that are part of verl. Their values are the defaults in the table of keys."""
_OVERRIDE = re.compile(r"(?P<sign>\+{0,2})(?P<key>[A-Za-z_][\w./@-]*)=(?P<value>.*)", re.DOTALL)
_INTERPOLATION = re.compile(r"\$\{(?:(?P<resolver>[\w.]+):)?\s*(?P<body>[^{}]*)\}")


@dataclass
class HydraConfig:
    """The keys that a run sets, by dotted name, in the order in which they were given."""

    values: dict[str, Any] = field(default_factory=dict)
    config_name: str = ""
    """The config that the keys are added to, without its ending."""
    notes: list[str] = field(default_factory=list)

    def resolve(self, value: Any, default_of: Callable[[str], Any], depth: int = 0) -> Any:
        """Replace `${a.b}`, `${oc.select:a.b,1}` and `${oc.env:NAME,x}`. `default_of` gives verl's default of a key."""
        if isinstance(value, list):
            return [self.resolve(entry, default_of, depth) for entry in value]
        if not isinstance(value, str) or "${" not in value or depth > 8:
            return value
        whole = _INTERPOLATION.fullmatch(value)
        if whole is not None:
            return self.resolve(self._looked_up(whole, default_of), default_of, depth + 1)

        def written(found: re.Match[str]) -> str:
            inner = self._looked_up(found, default_of)
            return "null" if inner is None else str(inner)

        text = _INTERPOLATION.sub(written, value)
        return self.resolve(text, default_of, depth + 1) if text != value else value

    def _looked_up(self, found: re.Match[str], default_of: Callable[[str], Any]) -> Any:
        name, comma, default = (part.strip() for part in found["body"].partition(","))
        if found["resolver"] == "oc.env":
            return os.environ.get(name, default)
        if found["resolver"] not in (None, "oc.select"):
            return ""
        if name in self.values:
            return self.values[name]
        value = default_of(name)
        return parse_value(default) if value is None and comma else value


def read_overrides(words: Sequence[str], folders: Sequence[Path]) -> HydraConfig:
    """The words after `python3 -m verl.trainer.main_ppo`. `folders` are searched for the config they name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for short, long in (("-cp", "--config-path"), ("-cn", "--config-name"), ("-cd", "--config-dir")):
        parser.add_argument(short, long, nargs="?", default="", const="")
    flags, others = parser.parse_known_args(list(words))
    name = flags.config_name.removesuffix(".yaml")
    path = Path(flags.config_dir or flags.config_path) / f"{name}.yaml"
    file = _find(path, folders) if name else None
    if name and file is None and name not in OWN_CONFIGS:
        raise ConfigError(
            f"--config-name {name}: {path} does not exist; run this command in the folder in which you start verl"
        )
    config = HydraConfig() if file is None else read_file(file, folders)
    config.config_name = name
    for word in others:
        if not word.startswith("--"):
            _override(config, word)
    return config


def read_file(path: Path, folders: Sequence[Path] = ()) -> HydraConfig:
    """A YAML file, after the files that its `defaults` name."""
    config = HydraConfig(config_name=path.stem)
    config.values |= _flat(_tree(path, config, [path.parent, *folders], 0))
    return config


def _override(config: HydraConfig, word: str) -> None:
    if word.startswith("~"):
        key = word[1:].partition("=")[0]
        config.values = {k: v for k, v in config.values.items() if k != key and not k.startswith(f"{key}.")}
        return
    found = _OVERRIDE.fullmatch(word)
    if found is None:
        config.notes.append(f"{word!r} is not `key=value` and is skipped")
        return
    for key, value in _flat(_value(found["value"]), found["key"]):
        config.values.pop(key, None)
        config.values[key] = value


def _value(text: str) -> Any:
    """Hydra's grammar is close to YAML's. A dict may have no space after its colons, and a list may be in quotes."""
    try:
        value = parse_value(re.sub(r"([{,]\s*[\w.]+):(?=[^\s/])", r"\1: ", text) if text.startswith("{") else text)
        return parse_value(value) if isinstance(value, str) and value.startswith("[") else value
    except yaml.YAMLError:
        return text


def _tree(path: Path, config: HydraConfig, folders: Sequence[Path], depth: int) -> dict[str, Any]:
    try:
        data = parse_value(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not YAML: {one_line(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a verl config: it must be a mapping")
    own = {key: value for key, value in data.items() if key not in ("defaults", "hydra")}
    tree: dict[str, Any] = {}
    entries = data.get("defaults") or []
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        if entry == "_self_":
            tree = merged(tree, own)
        elif depth < 8:
            tree = merged(tree, _default(entry, path, config, folders, depth))
    return tree


def _default(entry: Any, path: Path, config: HydraConfig, folders: Sequence[Path], depth: int) -> dict[str, Any]:
    """The tree of one entry of `defaults`: `ppo_trainer`, or `actor@actor_rollout_ref.actor: dp_actor`."""
    group, name = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
    group, _, package = str(group).removeprefix("override ").lstrip("/").partition("@")
    if isinstance(entry, str):
        name, _, package = entry.lstrip("/").partition("@")
    if name is None or group.startswith("hydra"):
        return {}
    file = _find(path.parent / group / f"{name}.yaml", [folder / group for folder in folders])
    if file is None or file == path:
        if str(name) not in OWN_CONFIGS:
            config.notes.append(f"{path.name}: the defaults entry {group or name} is not here; its keys are skipped")
        return {}
    tree = _tree(file, config, folders, depth + 1)
    keys = [] if package in ("_global_", "_here_") else (package or group).replace("/", ".").split(".")
    for key in reversed(keys):
        tree = {key: tree} if key else tree
    return tree


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and (value or not prefix):
        for key, inner in value.items():
            if key != "_target_":
                yield from _flat(inner, f"{prefix}.{key}".lstrip("."))
    else:
        yield prefix, value


def _find(path: Path, folders: Sequence[Path]) -> Path | None:
    """The file itself, or the same file below one of the folders."""
    if path.is_file():
        return path
    tail = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    candidates = [folder / tail for folder in folders] + [folder / path.name for folder in folders[:1]]
    return next((found for found in candidates if found.is_file()), None)
