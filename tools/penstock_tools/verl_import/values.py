"""The values of a verl run while they are translated, and the fields and findings that come out."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.run import RunConfig
from penstock_tools.verl_import.hydra import HydraConfig
from penstock_tools.verl_import.table.key import Key
from penstock_tools.verl_import.table.lookup import canonical_name, default_of, find_key


@dataclass
class Findings:
    """What the user should know: each entry is a verl key, its value, and a sentence."""

    changed: list[tuple[str, Any, str]] = field(default_factory=list)
    missing: list[tuple[str, Any, str]] = field(default_factory=list)
    unneeded: list[tuple[str, Any, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_same: int = 0
    """Keys that mean the same here, or ask for nothing."""

    @property
    def num_keys(self) -> int:
        return self.num_same + len(self.changed) + len(self.missing) + len(self.unneeded)


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
        self._reasons: dict[str, str] = {}
        self._without_effect: tuple[str, ...] = ()
        defaults = _Defaults(program)
        for name, raw in config.values.items():
            canonical = canonical_name(program, name)
            value = config.resolve(raw, defaults)
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

    def lose(self, name: str, reason: str) -> None:
        """Report a given key as one without counterpart, because its value has none."""
        if name in self.given:
            self._reasons[name] = reason

    def ignore(self, *prefixes: str) -> None:
        """Keys that have no effect in this run: those of a part of verl that it does not use."""
        self._without_effect += prefixes

    def set_direct(self, *, prefixes: tuple[str, ...] = ()) -> None:
        """Set the fields of keys that mean the same, for all keys or those below one of the prefixes."""
        from penstock_tools.verl_import.table.lookup import KEYS_BY_PROGRAM

        for row in KEYS_BY_PROGRAM[self.program]:
            if row.convert is None or (prefixes and not row.verl.startswith(prefixes)):
                continue
            value = self.get(row.verl)
            if value is None:
                continue
            ours = row.convert(value)
            if self.is_given(row.verl) or ours != look_up(_our_defaults(), row.ours[0]):
                self.set(row.ours[0], ours)

    def classify(self) -> None:
        """Sort every given key into the findings."""
        for name, value in self.given.items():
            row = find_key(self.program, name)
            shown = self.original[name]
            if value in (None, "", {}, []) or name.startswith(self._without_effect):
                self.findings.num_same += 1
            elif name in self._reasons:
                self.findings.missing.append((shown, value, self._reasons[name]))
            elif row is None:
                self.findings.missing.append((shown, value, "this key is not known"))
            else:
                self._add(row, shown, value)

    def _add(self, row: Key, shown: str, value: Any) -> None:
        if row.status == "missing" and value not in row.harmless:
            self.findings.missing.append((shown, value, row.note))
        elif row.status == "changed":
            self.findings.changed.append((shown, value, f"{self._ours(row)}; {row.note}"))
        elif row.status == "unneeded":
            self.findings.unneeded.append((shown, value, row.note))
        else:
            self.findings.num_same += 1

    def _ours(self, row: Key) -> str:
        found = [(name, look_up(self.fields, name)) for name in row.ours]
        return ", ".join(f"{name}: {value}" if value is not None else name for name, value in found)


class _Defaults(dict[str, Any]):
    """verl's defaults by key, for interpolations."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self.program = program

    def get(self, name: str, default: Any = None) -> Any:
        row = find_key(self.program, name)
        return default if row is None or row.default is None else row.default


def local_path(value: Any) -> str:
    """A path, with `~` replaced by the home folder."""
    text = str(value)
    return str(Path(text).expanduser()) if text.startswith("~") else text


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
