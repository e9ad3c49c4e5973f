"""The files that a dataset's path names: one file, a folder, or all that a pattern matches."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ConfigError

_PATTERN = ("*", "?", "[")


def matching_files(path: Path) -> list[Path]:
    """The files of a path or pattern, in the order of their names. Raises ConfigError if there are none."""
    if path.exists():
        return [path]
    text = str(path)
    if not any(sign in text for sign in _PATTERN):
        raise ConfigError(f"dataset {path} does not exist")
    found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not found:
        raise ConfigError(f"no file matches dataset {path}")
    return found
