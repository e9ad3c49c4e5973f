"""Write the tables of dependencies.md, from the packages and their reasons in pyproject.toml.

python docs/make_dependencies.py
"""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
PAGE = Path(__file__).parent / "dependencies.md"
TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->\n)", re.DOTALL)
LIST = re.compile(r"^([\w-]+) = \[\n(.*?)^\]", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"""^    "([\w.-]+(?:\[\w+\])?)[^"]*",(?:  # (.+))?$""", re.MULTILINE)


def reasons() -> dict[str, list[tuple[str, str]]]:
    """Packages and reason of every row, by the list that they are in. A package without a reason shares the row above,
    unless an earlier list has named it."""
    text = PROJECT.read_text()
    text = text[text.index("\ndependencies = [") : text.index("\n[project.scripts]")]
    lists: dict[str, list[tuple[str, str]]] = {}
    named: set[str] = set()
    for name, body in LIST.findall(text):
        rows = lists.setdefault(name, [])
        for package, reason in ENTRY.findall(body):
            if reason:
                rows.append((package, reason))
            elif package not in named:
                rows[-1] = (f"{rows[-1][0]}, {package}", rows[-1][1])
            named.add(package)
    return lists


def build() -> str:
    """The whole page, with its tables made again."""
    found = reasons()

    def table(match: re.Match[str]) -> str:
        rows = [row for name in match[2].split(", ") for row in found.pop(name)]
        lines = ["| package | why |", "|---|---|", *(f"| {packages} | {reason} |" for packages, reason in rows)]
        return match[1] + "\n".join(lines) + "\n" + match[3]

    text = TABLE.sub(table, PAGE.read_text())
    assert not found, f"dependencies.md has no table for {', '.join(found)}"
    return text


if __name__ == "__main__":
    PAGE.write_text(build())
