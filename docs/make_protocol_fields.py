"""Write the tables of protocols.md: every field of the protocols, read from the bodies in penstock/protocols.

python docs/make_protocol_fields.py
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from penstock.protocols import anthropic, bodies, chat, responses

PAGE = Path(__file__).parent / "protocols.md"
MARK = "<!-- The tables below are written by docs/make_protocol_fields.py. -->\n"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
OPENAI = {
    "/v1/chat/completions": chat.ChatBody,
    "/v1/completions": chat.CompletionBody,
    "/v1/responses": responses.ResponsesBody,
}
ROUTES = {**OPENAI, MESSAGES: anthropic.MessagesBody, COUNT: anthropic.CountBody}


def field_notes(body: type[bodies.Body]) -> dict[str, str]:
    """The docstrings of a body's fields, in one line each."""
    notes: dict[str, str] = {}
    for owner in reversed(body.__mro__):
        if not issubclass(owner, bodies.Body) or owner is bodies.Body:
            continue
        [tree] = ast.parse(inspect.getsource(owner)).body
        assert isinstance(tree, ast.ClassDef)
        for before, after in zip(tree.body, tree.body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and is_text:
                notes[before.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return notes


def treatment(name: str, body: type[bodies.Body], notes: dict[str, str]) -> tuple[str, str, str]:
    """How a field is treated, why, and its name with the values that are accepted nevertheless."""
    for mark in body.model_fields[name].metadata:
        if isinstance(mark, bodies.Refused):
            neutral = " or ".join(f"`{value!r}`" for value in mark.neutral)
            return "refused", mark.why, f"`{name}`" + (f" (unless {neutral})" if neutral else "")
        if isinstance(mark, bodies.NoEffect):
            return "no effect", mark.why, f"`{name}`"
    return "honoured", notes.get(name, ""), f"`{name}`"


def build() -> str:
    """The whole page, with its tables made again. Fields that all routes, or all of OpenAI's, treat alike are in the
    first two tables alone."""
    treated = {route: treatments(body) for route, body in ROUTES.items()}
    shared = set.intersection(*treated.values())
    of_openai = set.intersection(*(treated[route] for route in OPENAI)) - shared
    tables = {"All routes": shared, "All routes of OpenAI": of_openai}
    for route in (*OPENAI, MESSAGES):
        tables[f"`{route}`"] = treated[route] - shared - (of_openai if route in OPENAI else set())
    absent = sorted(text for _, _, text in treated[MESSAGES] - treated[COUNT])
    assert treated[COUNT] <= treated[MESSAGES]
    return "".join([
        PAGE.read_text().partition(MARK)[0] + MARK,
        *(f"\n### {title}\n" + _table(fields) for title, fields in tables.items()),
        f"\n### `{COUNT}`\nThe fields of `{MESSAGES}` except {', '.join(absent)}.\n",
    ])  # fmt: skip


def treatments(body: type[bodies.Body]) -> set[tuple[str, str, str]]:
    notes = field_notes(body)
    return {treatment(name, body, notes) for name in body.model_fields}


def _table(fields: set[tuple[str, str, str]]) -> str:
    names: dict[tuple[str, str], list[str]] = {}
    for kind, why, text in sorted(fields, key=lambda field: field[2]):
        names.setdefault((kind, why), []).append(text)
    order = ("honoured", "refused", "no effect")
    rows = sorted(names, key=lambda key: (order.index(key[0]), key[1] != ""))
    lines = [f"| {', '.join(names[row])} | {row[0]}{': ' + row[1] if row[1] else ''} |" for row in rows]
    return "| fields | |\n|---|---|\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(build())
