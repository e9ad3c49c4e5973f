"""What an import says: which keys changed their meaning, which have no counterpart, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock_tools.verl_import.imported import Imported
from penstock_tools.verl_import.offline import command_line


def report_lines(imported: Imported, *, shows_unneeded: bool = True) -> list[str]:
    findings = imported.findings
    lines = [
        f"{findings.num_keys} keys: {findings.num_same} mean the same, {len(findings.changed)} changed, "
        f"{len(findings.unneeded)} are not needed, {len(findings.missing)} have no counterpart"
    ]
    lines += _listed("No counterpart: decide what to do about these", findings.missing)
    lines += _listed("Changed meaning: check these", findings.changed)
    if shows_unneeded:
        lines += _listed("Not needed here", findings.unneeded)
    if findings.notes:
        lines += ["", "Notes", *(f"  {note}" for note in findings.notes)]
    return lines


def config_text(imported: Imported, source: str, file: str) -> str:
    """The YAML file: how to use it, the fields, and as comments what the import lost or changed."""
    if imported.command:
        head = [f"# Imported from {source}. Use it with: {command_line(imported.command, file)}"]
    else:
        head = [
            f"# Imported from {source}. Check it with `penstock up {file} --check`.",
            f"# `penstock plan --config {file} --gpu NAME` says whether it fits. docs/coming-from-verl.md explains.",
        ]
    tail = [f"# {line}".rstrip() for line in report_lines(imported, shows_unneeded=False)]
    return "\n".join([*head, "", imported.yaml(), *tail, ""])


def _listed(title: str, entries: Iterable[tuple[str, Any, str]]) -> list[str]:
    lines = [f"  {name}={_short(value)}\n      {reason}" for name, value, reason in entries]
    return ["", title, *"\n".join(lines).splitlines()] if lines else []


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
