"""Finds the boxed answer of a mathematical solution."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def last_box(text: str) -> str | None:
    """The content of the last complete `\\boxed{…}` or `\\fbox{…}`, or of `\\boxed 5`; None if there is none.

    A box whose braces are not closed, as at the end of a truncated response, does not count."""
    for start in reversed(list(_BOX.finditer(text))):
        content = _in_braces(text, start.end()) if text[start.end() : start.end() + 1] == "{" else _word(text, start)
        if content is not None:
            return content
    return None


def _in_braces(text: str, start: int) -> str | None:
    """The text between the brace at `start` and the one that closes it."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 1 : place]
    return None


def _word(text: str, box: re.Match[str]) -> str | None:
    """The word after a box without braces, up to white space or the end of the formula."""
    if not box.group().endswith((" ", "\t")):
        return None
    word = re.match(r"[^\s$]+", text[box.end() :])
    return word.group() if word else None
