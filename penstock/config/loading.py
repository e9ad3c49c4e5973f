"""Load a run's configuration: a YAML file, then `--section.field value` overrides with the same names.

Every mistake is reported in one line: an unknown key with the nearest known one, a wrong value with its field's path.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ValidationError

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
    for keys, value in parse_overrides(overrides):
        _assign(data, keys, value)
    return validate(data, source)


def validate(data: dict[str, Any], source: str) -> RunConfig:
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error)}") from error


def validate_field(data: dict[str, Any], field: str) -> RunConfig:
    """Like `validate`, for a config that arrived as the field of a request: raises InvalidInput with the full path."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        path = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise InvalidInput(f"{field}.{path}".rstrip("."), _explain(error).removeprefix(f"{path}: ")) from error


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
            if not remaining:
                raise ConfigError(f"--{name} needs a value")
            text = remaining.pop(0)
        try:
            value = yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"--{name}: {text!r} is not a value: {_one_line(error)}") from error
        pairs.append((name.replace("-", "_").split("."), value))
    return pairs


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path} does not exist; examples are in examples/") from error
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: it is not a text file; give the run's YAML file") from error
    try:
        data = yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_one_line(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must be a mapping with at least the key `model:`")
    return data


def _assign(data: dict[str, Any], keys: list[str], value: Any) -> None:
    for depth, key in enumerate(keys[:-1]):
        inner = data.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--{'.'.join(keys)}: {'.'.join(keys[: depth + 1])} is not a section")
        data = inner
    data[keys[-1]] = value


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    dotted = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _fields_at(path[:-1])
        nearest = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(known)}"
        message = f"unknown key {dotted!r}; {hint}"
    elif first["type"] == "missing":
        message = f"{dotted} is missing"
    else:
        message = f"{dotted}: {first['msg']} (given: {first['input']!r})" if dotted else first["msg"]
    others = error.error_count() - 1
    return _one_line(message) + (f" (and {others} more)" if others else "")


def _fields_at(path: Sequence[str]) -> list[str]:
    """Field names of the model at `path`. The path may pass through sections, mappings and choices by `kind`."""
    annotation: Any = RunConfig
    for part in path:
        models = _models_in(annotation)
        chosen = [model for model in models if part in _kinds_of(model)]
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif chosen:
            annotation = chosen[0]
        elif models and part in models[0].model_fields:
            annotation = models[0].model_fields[part].annotation
    return list((_models_in(annotation) or [RunConfig])[0].model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _kinds_of(model: type[BaseModel]) -> tuple[Any, ...]:
    return get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
