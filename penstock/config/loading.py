"""Load a run's configuration: a YAML file, then `--section.field value` overrides with the same names.

Every mistake is reported in one line: an unknown key with the nearest known one, a wrong value with its field's path
and what is expected (explanation.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import ValidationError

from penstock.config.explanation import Mistake, explain
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, InvalidInput


class _Loader(yaml.SafeLoader):
    """Reads floats as YAML 1.2 does: `1e-4` is a number. PyYAML's own loader makes it a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$"), list("-+0123456789.")
)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path`, apply overrides such as `["--learner.num_steps", "20"]`, and validate the result."""
    _refuse_visible_password(overrides)
    return load_overrides(_read(path), overrides, str(path))


def read_config(path: Path) -> dict[str, Any]:
    """The data of a file as it is written, without defaults."""
    return _read(path)


def parse_config(text: str, source: str) -> RunConfig:
    """Like `load_config`, for the text of a file. `source` is its name in errors."""
    return validate(_parse(text, source), source)


def _refuse_visible_password(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a URL of Redis with a password: every user of the machine can read command lines."""
    for keys, value in parse_overrides(overrides):
        url = value.get("url") if list(keys) == ["redis"] and isinstance(value, dict) else value
        if list(keys) in (["redis"], ["redis", "url"]) and isinstance(url, str) and urlsplit(url).password:
            raise ConfigError(
                "redis.url on the command line shows its password to every user of this machine; "
                "set redis.password_file, or write the url into the config file"
            )


def load_overrides(data: dict[str, Any], overrides: Sequence[str], source: str = "command line") -> RunConfig:
    """Like `load_config`, for data that is already parsed."""
    given = parse_overrides(overrides)
    for keys, value in given:
        _assign(data, keys, value)
    return validate(data, source, [keys for keys, _ in given])


def validate(data: dict[str, Any], source: str, overridden: Sequence[Sequence[str]] = ()) -> RunConfig:
    """`overridden` are the keys that are from the command line and not from `source`. ConfigError has a line for each
    wrong field."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        lines = [f"{_origin(found, source, overridden)}: {found.line}" for found in explain(error, RunConfig)]
        raise ConfigError("\n".join(lines)) from error


def validate_field(data: dict[str, Any], field: str) -> RunConfig:
    """Like `validate`, for a config that arrived as the field of a request: raises InvalidInput with the full path of
    the first wrong field."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        first, *others = explain(error, RunConfig)
        more = f" (and {len(others)} more)" if others else ""
        raise InvalidInput(f"{field}.{first.dotted}".rstrip("."), first.text + more) from error


def _origin(mistake: Mistake, source: str, overridden: Sequence[Sequence[str]]) -> str:
    path = list(mistake.path)
    is_flag = any(path[: len(keys)] == list(keys)[: len(path)] for keys in overridden)
    return "command line" if is_flag else source


def dump_config(config: RunConfig) -> str:
    """Return the resolved configuration as YAML that `load_config` can read."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def parse_overrides(words: Sequence[str]) -> list[tuple[list[str], Any]]:
    """Parse `--a.b value` and `--a.b=value` pairs. Values are YAML, so numbers, lists and null work."""
    pairs: list[tuple[list[str], Any]] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} is not an override; write --section.field value")
        name, has_value, text = word[2:].partition("=")
        if not has_value:
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"--{name} needs a value")
            text = remaining.pop(0)
        try:
            value = parse_value(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--{name}: {text!r} is not a value: {_one_line(error)}") from error
        pairs.append((name.replace("-", "_").split("."), value))
    return pairs


def parse_value(text: str) -> Any:
    """A value in YAML, in which `1e-4` is a number. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path} does not exist; write one with `penstock init {path}`") from error
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: it is not a text file; give the run's YAML file") from error
    return _parse(text, str(path))


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        data = parse_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {_one_line(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must be a mapping with at least the key `model:`")
    return data


def _assign(data: dict[str, Any], keys: list[str], value: Any) -> None:
    for depth, key in enumerate(keys[:-1]):
        inner = data.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--{'.'.join(keys)}: {'.'.join(keys[: depth + 1])} is not a section")
        data = inner
    data[keys[-1]] = value


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
