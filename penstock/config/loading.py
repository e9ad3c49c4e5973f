"""Load a run's configuration: a YAML file, then `--section.field value` overrides with the same names.

Every mistake is one line: a wrong value with its field's path and what is expected, an unknown key with the nearest.

    learner.lr: must be a number, not 'fast'
    unknown key 'learner.num_step'; did you mean 'num_steps'?

A file may extend others, whose values hold where it has none: `extends: base.yaml`, or a list.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, get_args, get_origin
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from penstock.config.run import RunConfig
from penstock.errors import ConfigError, one_line

MAX_SHOWN = 60
"""A longer value is cut in a message."""
_TEXTS = {
    "int": "a whole number", "float": "a number", "finite": "a finite number", "bool": "true or false",
    "string": "text", "path": "a path", "tuple": "a list", "list": "a list", "set": "a list",
    "dict": "a mapping of keys to values", "model": "a section with keys", "date": "a date",
}  # fmt: skip
"""What is expected, by the first word of pydantic's error type, such as `int_parsing`."""
_BOUNDS = {
    "greater_than": ("gt", "above"), "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"), "less_than_equal": ("le", "at most"),
}  # fmt: skip
_FORMS = {
    r"^[a-z0-9][a-z0-9_-]{0,62}$": "at most 63 small letters, digits, - and _, without spaces",
    r"^[A-Za-z0-9._-]{1,64}$": "at most 64 letters, digits, ., - and _, without spaces",
    r"^(https?://.+)?$": "a URL that starts with http:// or https://",
    r"^(auto|[^/\s]+:[0-9]{1,5})?$": "HOST:PORT of a Ray head, such as 10.0.0.1:6380, or auto",
    r"^([a-z][a-z0-9+.-]*://.+)?$": "the URL of a folder, such as s3://bucket/folder",
}
"""Patterns of fields in words."""
_LENGTHS = {"too_short": ("min_length", "at least"), "too_long": ("max_length", "at most")}


@dataclass(frozen=True)
class Mistake:
    path: tuple[str, ...]
    """Keys from the root to the field, as a user writes them."""
    text: str
    """One line, without the path."""
    names_field: bool = False
    """Whether the text itself names the field."""

    @property
    def dotted(self) -> str:
        return dotted(self.path)

    @property
    def line(self) -> str:
        return self.text if self.names_field or not self.path else f"{self.dotted}: {self.text}"


def explain(error: ValidationError, model: type[BaseModel]) -> list[Mistake]:
    """The mistakes of a config of type `model`, unknown keys first: a missing key may be one of them, misspelled."""
    found: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        found.setdefault(_user_path(details, model), []).append(details)
    mistakes = [_mistake(path, errors, model) for path, errors in found.items()]
    unknown = [mistake for mistake in mistakes if mistake.text.startswith("unknown key")]
    suggested = {hint for mistake in unknown for hint in re.findall(r"did you mean '(.+)'", mistake.text)}
    misspelled = tuple(f"{name} is missing" for name in suggested)
    # A list that is wrong inside is also not the text that the field may have instead.
    outer = {mistake.path[:depth] for mistake in mistakes for depth in range(len(mistake.path))}
    others = [mistake for mistake in mistakes if mistake not in unknown and mistake.path not in outer]
    return [*unknown, *(mistake for mistake in others if not mistake.text.startswith(misspelled))]


def describe(errors: Sequence[ErrorDetails]) -> str:
    """What is wrong with one value, in a line. There is one error for each type that it may have."""
    first = errors[0]
    if first["type"] == "missing":
        return "is missing"
    if first["type"] in ("value_error", "assertion_error"):
        return one_line(first["ctx"]["error"] if "ctx" in first else first["msg"])
    expected = " or ".join(dict.fromkeys(map(_expected, errors)))
    given = "empty" if first["input"] is None else repr(first["input"])
    shown = given if len(given) <= MAX_SHOWN else f"{given[:MAX_SHOWN]}…"
    return one_line(f"must be {expected}, not {shown}{_nearest(first)}")


def dotted(path: Sequence[str]) -> str:
    """`("learner", "loggers", "2")` is `learner.loggers[2]`."""
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path).lstrip(".")


def hint_for_key(path: Sequence[str], model: type[BaseModel]) -> str:
    """What may be meant by an unknown key: a similar key of the same section, or one of another section."""
    *section, key = path
    key, models = key.lower(), _models_at(section, model) or [model]
    if key.startswith("sandbox_fusion"):
        return "no such service is called: programs run in the rollout server's own sandbox; remove the key"
    known = list(dict.fromkeys(name for found in models for name in found.model_fields))
    elsewhere: dict[str, str] = {}
    for found in sorted(paths_of(model), key=lambda found: found.count(".")):
        elsewhere.setdefault(found.rpartition(".")[2], found)
    for nearest in (
        difflib.get_close_matches(key, known, n=1, cutoff=0.7),
        [name for name in known if len(key) > 2 and key in name],
        [elsewhere[name] for name in difflib.get_close_matches(key, elsewhere, n=1, cutoff=0.8)],
        [found for name, found in elsewhere.items() if len(key) > 2 and key in name],
        difflib.get_close_matches(key, known, n=1, cutoff=0.6),
    ):
        if nearest:
            return f"did you mean {nearest[0]!r}?"
    return f"known keys: {', '.join(known)}"


def paths_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted paths of all fields, without those of mappings, whose keys are the user's."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if get_origin(field.annotation) is not dict:
            for inner in _models_in(field.annotation):
                yield from paths_of(inner, f"{prefix}{name}.")


def _mistake(path: tuple[str, ...], errors: Sequence[ErrorDetails], model: type[BaseModel]) -> Mistake:
    first = errors[0]
    if first["type"] == "extra_forbidden":
        # The names of kinds in pydantic's location choose among the sections that a field may hold.
        return Mistake(path, f"unknown key {dotted(path)!r}; {hint_for_key([*map(str, first['loc'])], model)}", True)
    if first["type"] == "missing":
        expected = _description(path, model)
        return Mistake(path, f"{dotted(path)} is missing{f'; give {expected}' if expected else ''}", True)
    return Mistake(path, describe(errors))


def _expected(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{words} {context[name]:g}"
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "")
    if kind == "union_tag_invalid":
        return f"of kind {context['expected_tags']}".replace("'", "")
    if kind == "union_tag_not_found":
        return f"a section with the key {context['discriminator']}".replace("'", "")
    if kind == "string_pattern_mismatch":
        return _FORMS.get(context["pattern"], f"text of the form {context['pattern']}")
    ending = kind.removeprefix("string_")
    if ending in _LENGTHS:
        name, words = _LENGTHS[ending]
        thing = "characters" if kind.startswith("string_") else "items"
        return f"{words} {context[name]} {thing if context[name] != 1 else thing[:-1]} long"
    return _TEXTS.get(kind.partition("_")[0], "") or error["msg"].removeprefix("Input should be ")


def _nearest(error: ErrorDetails) -> str:
    """The nearest of the names that a field may have."""
    context = error.get("ctx", {})
    known = re.findall(r"'([^']+)'", str(context.get("expected") or context.get("expected_tags") or ""))
    given = context.get("tag", error["input"])
    nearest = difflib.get_close_matches(given, known, n=1, cutoff=0.5) if isinstance(given, str) else []
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _description(path: Sequence[str], model: type[BaseModel]) -> str:
    """What a field takes, for one that is missing."""
    *section, name = path
    sections = _models_at(section, model)
    field = next((found.model_fields[name] for found in sections if name in found.model_fields), None)
    if field is None:
        return ""
    inner = _models_in(field.annotation)
    if inner:
        needed = [key for key, value in inner[0].model_fields.items() if value.is_required()]
        return f"a section with {', '.join(needed)}" if needed else "a section"
    names = {Path: "path", int: "int", float: "float", str: "string", bool: "bool"}
    types = [kind for kind in names if field.annotation is kind or kind in get_args(field.annotation)]
    return _TEXTS[names[types[0]]] if types else ""


def _user_path(error: ErrorDetails, model: type[BaseModel]) -> tuple[str, ...]:
    """pydantic's location without the names of the types of a union, which no user writes."""
    *outer, last = [str(part) for part in error["loc"]] or [""]
    unknown = [last] if error["type"] == "extra_forbidden" else []
    known = outer if unknown else [*outer, last]
    return (*(part for part, _ in _walk(known, model) if part), *unknown)


def _models_at(path: Sequence[str], model: type[BaseModel]) -> list[type[BaseModel]]:
    """The models that the value at `path` may be."""
    return [[model], *(models for _, models in _walk(path, model))][-1]


def _walk(path: Sequence[str], model: type[BaseModel]) -> Iterator[tuple[str, list[type[BaseModel]]]]:
    """Each key of a path, with the models that its value may be. A key that no user writes is empty."""
    annotation: Any = model
    for part in path:
        models = _models_in(annotation)
        if (mapping := _mapping_in(annotation)) is not None:
            annotation = get_args(mapping)[1]
            yield part, _models_in(annotation)
        elif chosen := [
            found
            for found in models
            if "kind" in found.model_fields and part in get_args(found.model_fields["kind"].annotation)
        ]:
            annotation = chosen[0]
            yield "", chosen
        elif owner := next((found for found in models if part in found.model_fields), None):
            annotation = owner.model_fields[part].annotation
            yield part, _models_in(annotation)
        elif part.isdigit():
            yield part, models


def _mapping_in(annotation: Any) -> Any:
    if get_origin(annotation) is dict:
        return annotation
    return next((found for found in map(_mapping_in, get_args(annotation)) if found is not None), None)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


class _Loader(yaml.SafeLoader):
    """Reads floats as YAML 1.2 does: `1e-4` is a number. PyYAML's own loader makes it a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$"), list("-+0123456789.")
)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path`, apply overrides such as `["--learner.num_steps", "20"]`, and validate the result."""
    _refuse_visible_password(overrides)
    layers = read_layers(path)
    return load_overrides(folded(layers), overrides, layers)


def _refuse_visible_password(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a URL of Redis with a password: every user of the machine can read command lines."""
    for keys, value in parse_overrides(overrides):
        url = value.get("url") if list(keys) == ["redis"] and isinstance(value, dict) else value
        if list(keys) in (["redis"], ["redis", "url"]) and isinstance(url, str) and urlsplit(url).password:
            raise ConfigError(
                "redis.url on the command line shows its password to every user of this machine; "
                "set redis.password_file, or write the url into the config file"
            )


def load_overrides(
    data: dict[str, Any], overrides: Sequence[str], source: str | Sequence[Layer] = "command line"
) -> RunConfig:
    """Like `load_config`, for data that is already parsed."""
    given = parse_overrides(overrides)
    for keys, value in given:
        _assign(data, keys, value)
    return validate(data, source, [keys for keys, _ in given])


def validate(
    data: dict[str, Any], source: str | Sequence[Layer], overridden: Sequence[Sequence[str]] = ()
) -> RunConfig:
    """Raises ConfigError with a line for each wrong field. The keys in `overridden` are from the command line."""
    try:
        config = RunConfig.model_validate(data)
        return config.changed(config.certificates_of_redis)
    except ValidationError as error:
        lines = []
        for mistake in explain(error, RunConfig):
            path = list(mistake.path)
            is_flag = any(path[: len(keys)] == list(keys)[: len(path)] for keys in overridden)
            named = source if isinstance(source, str) else _files_with(path, source)
            lines.append(f"{'command line' if is_flag else named}: {mistake.line}")
        raise ConfigError("\n".join(lines)) from error


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
            raise ConfigError(f"--{name}: {text!r} is not a value: {one_line(error)}") from error
        pairs.append((name.replace("-", "_").split("."), value))
    return pairs


def parse_value(text: str) -> Any:
    """A value in YAML, in which `1e-4` is a number. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader)


@dataclass(frozen=True)
class Layer:
    """What one file says."""

    file: Path
    data: dict[str, Any]


def read_config(path: Path) -> dict[str, Any]:
    """The data of a file and of those that it extends, without defaults."""
    return folded(read_layers(path))


def folded(layers: Sequence[Layer]) -> dict[str, Any]:
    return reduce(merged, (layer.data for layer in layers), {})


def read_layers(path: Path) -> list[Layer]:
    """A file and all that it extends, each once: the ones that it extends come before it. Their names are relative to
    the file that has them. Paths of other fields are not: they are relative to the folder of the command."""
    layers: dict[Path, Layer] = {}
    _read_layers(path, (), layers)
    return list(layers.values())


def _read_layers(path: Path, chain: tuple[Path, ...], layers: dict[Path, Layer]) -> None:
    """Add `path`, which the last of `chain` extends, and before it what it extends."""
    if (file := path.resolve()) in layers:
        return
    if file in [before.resolve() for before in chain]:
        raise ConfigError(f"{' extends '.join(map(str, (*chain, path)))}: remove one of these `extends`")
    data = _parse(_read(path, chain), str(path))
    names = data.pop("extends", [])
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{path}: extends must be a file or a list of files, not {names!r}")
        _read_layers(path.parent / name, (*chain, path), layers)
    layers[file] = Layer(path, data)


def _read(path: Path, chain: Sequence[Path]) -> str:
    try:
        return path.read_text()
    except FileNotFoundError as error:
        if chain:
            text = f"{chain[-1]} extends {path}, which does not exist; `extends` is relative to the file that has it"
            raise ConfigError(text) from error
        raise ConfigError(f"config file {path} does not exist; write one with `penstock init {path}`") from error
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: it is not a text file; give the run's YAML file") from error


def _files_with(path: Sequence[str], layers: Sequence[Layer]) -> str:
    """The file that has the value at `path`, or all that have a part of the section there. If none has it, those with
    the section around it."""
    found: list[str] = []
    for layer in reversed(layers):
        is_there, value = _value_at(path, layer.data)
        if is_there and (isinstance(value, dict) or not found):
            found.insert(0, str(layer.file))
        if is_there and not isinstance(value, dict):
            break
    return " and ".join(found) if found and path else _files_with(path[:-1], layers) if path else str(layers[-1].file)


def _value_at(path: Sequence[str], data: Any) -> tuple[bool, Any]:
    """Whether the data has the path, and its value."""
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return False, None
        data = data[key]
    return True, data


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        data = parse_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {one_line(error)}") from error
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


def merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `other`, section by section. A section of another `kind` replaces the whole one."""
    if "kind" in base and base["kind"] != other.get("kind", base["kind"]):
        return dict(other)
    result = dict(base)
    for name, value in other.items():
        before = result.get(name)
        result[name] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result
