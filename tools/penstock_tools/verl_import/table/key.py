"""One row of the table of verl's keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["same", "changed", "unneeded", "missing"]


@dataclass(frozen=True)
class Key:
    """A key of verl and what becomes of it.

    same: ours means the same. changed: ours is set from it, and `note` says what differs. unneeded: nothing is lost
    without it. missing: there is no counterpart, and `note` says why or what to do."""

    verl: str
    """Dotted name. `*` stands for any text."""
    status: Status
    ours: tuple[str, ...] = ()
    """Dotted names of our fields."""
    note: str = ""
    default: Any = None
    """verl's default. It holds for a run that does not set the key."""
    convert: Callable[[Any], Any] | None = None
    """Makes our value from verl's. None: `run.py` computes it, from several keys."""
    harmless: tuple[Any, ...] = ()
    """Values of a missing key that ask for nothing."""
    alias_of: str = ""
    """The key that this is another name of, in older or newer versions. If both end with `*`, so do all keys below."""


def same(verl: str, ours: str, default: Any = None, convert: Callable[[Any], Any] = lambda value: value) -> Key:
    """Our field takes the value, or the converted value."""
    return Key(verl, "same", (ours,), default=default, convert=convert)


def computed(verl: str, ours: str, default: Any = None, note: str = "") -> Key:
    """`run.py` computes our fields. With a note the meaning differs."""
    return Key(verl, "changed" if note else "same", tuple(ours.split()), note, default)


def unneeded(verl: str, note: str, default: Any = None) -> Key:
    return Key(verl, "unneeded", note=note, default=default)


def missing(verl: str, note: str, *harmless: Any) -> Key:
    return Key(verl, "missing", note=note, default=harmless[0] if harmless else None, harmless=(*harmless, None))


def alias(verl: str, of: str) -> Key:
    return Key(verl, "same", alias_of=of, note=f"another name of `{of}`")
