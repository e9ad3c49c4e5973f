"""Expands shell words: variables, defaults, arrays, arithmetic, and the few commands that make names and paths."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock_tools.verl_import.shell.words import Statement, bracket_end, span

Value = str | list[str]
_NAME = re.compile(r"\w+|[@*#?$!]")
_PARAMETER = re.compile(r"(?P<count>#?)(?P<name>\w+|[@*#])(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)", re.DOTALL)
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv, ast.Pow: operator.pow,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip


class Expansion:
    """The variables of a script. `unknown` collects what could not be computed: names that nothing sets, commands that
    are not run."""

    def __init__(self, environment: Mapping[str, str], arguments: Sequence[str], script: str) -> None:
        self.variables: dict[str, Value] = dict(environment)
        self.arguments = list(arguments)
        self.script = script
        self.unknown: dict[str, None] = {}
        self.functions: dict[str, list[Statement]] = {}

    def words(self, raw: Sequence[str]) -> list[str]:
        return [word for part in raw for word in self._split(part)]

    def text(self, raw: str) -> str:
        """One word, as on the right of an assignment, where nothing is split."""
        return "".join(piece if isinstance(piece, str) else " ".join(piece) for piece, _ in self._pieces(raw))

    def assign(self, name: str, raw: str) -> None:
        """`name+` adds to what the variable has."""
        name, adds = name.removesuffix("+"), name.endswith("+")
        before = self.variables.get(name, "")
        if raw.startswith("(") and raw.endswith(")"):
            old = ([before] if before else []) if isinstance(before, str) else before
            self.variables[name] = [*(old if adds else []), *self.words(_raw_words(raw[1:-1]))]
        else:
            old_text = before if isinstance(before, str) else " ".join(before)
            self.variables[name] = (old_text if adds else "") + self.text(raw)

    def _split(self, raw: str) -> list[str]:
        """The words that one raw word becomes: an array in quotes is one word for each entry."""
        result, is_open = [""], False
        for piece, is_quoted in self._pieces(raw):
            entries = [piece] if isinstance(piece, str) else piece
            if not is_quoted:
                entries = [word for entry in entries for word in (entry.split() or [""])]
            if isinstance(piece, list) and not entries:
                continue
            is_open = is_open or is_quoted or any(entries)
            result[-1] += entries[0] if entries else ""
            result += entries[1:]
        return result if is_open else []

    def _pieces(self, raw: str) -> list[tuple[Value, bool]]:
        """The parts of a word, each with whether it is literal or quoted, so that white space does not split it."""
        pieces: list[tuple[Value, bool]] = []
        at = 0
        while at < len(raw):
            end = span(raw, at)
            if raw[at] == "'":
                pieces.append((raw[at + 1 : end - 1], True))
            elif raw[at] == '"':
                inner = self._quoted(raw[at + 1 : end - 1])
                pieces += [] if _is_empty_array(inner) else inner
            elif raw[at] == "\\":
                pieces.append((raw[at + 1 : end], True))
            elif raw[at] == "$" or raw[at] == "`":
                piece, end = self._dollar(raw, at)
                pieces.append((piece, False))
            else:
                pieces.append((raw[at], True))
            at = end
        return pieces

    def _quoted(self, raw: str) -> list[tuple[Value, bool]]:
        pieces: list[tuple[Value, bool]] = [("", True)]
        at = 0
        while at < len(raw):
            if raw[at] == "\\" and raw[at + 1 : at + 2] in tuple('"\\$`\n'):
                piece, end = raw[at + 1 : at + 2].replace("\n", ""), at + 2
                pieces.append((piece, True))
            elif raw[at] in "$`":
                value, end = self._dollar(raw, at)
                pieces.append((value, True))
            else:
                pieces.append((raw[at], True))
                end = at + 1
            at = end
        return pieces

    def _dollar(self, raw: str, at: int) -> tuple[Value, int]:
        end = span(raw, at)
        if raw[at] == "`":
            return self._command(raw[at + 1 : end - 1]), end
        if raw.startswith("$((", at):
            return self._arithmetic(raw[at + 3 : end - 2]), end
        if raw.startswith("$(", at):
            return self._command(raw[at + 2 : end - 1]), end
        if raw.startswith("${", at):
            return self._parameter(raw[at + 2 : end - 1]), end
        name = _NAME.match(raw, at + 1)
        if name is None:
            return "$", at + 1
        if name[0][0].isdigit():
            return self._get(name[0][0]), at + 2
        return self._get(name[0]), name.end()

    def _parameter(self, inner: str) -> Value:
        found = _PARAMETER.fullmatch(inner)
        if found is None:
            return self._not_known(f"${{{inner}}}")
        name, index, rest = found["name"], found["index"], found["rest"]
        is_set = self._is_set(name)
        if rest.startswith((":-", ":=", "-", "=", ":+", "+", ":?", "?")):
            return self._or_default(name, rest, is_set)
        value = self._get(name)
        if isinstance(value, list) and re.fullmatch(r":\d+", rest):  # `${@:2}` begins with the second
            return value[max(0, int(rest[1:]) - (name in "@*")) :]
        if found["count"]:
            return str(len(value))
        if index is not None:
            entries = [value] if isinstance(value, str) else value
            if index in ("@", "*"):
                return entries
            value = entries[int(index)] if index.lstrip("-").isdigit() and int(index) < len(entries) else ""
        return _changed(value if isinstance(value, str) else " ".join(value), self.text(rest)) if rest else value

    def _or_default(self, name: str, rest: str, is_set: bool) -> Value:
        sign, default = (rest[1], rest[2:]) if rest[0] == ":" else (rest[0], rest[1:])
        has_value = is_set and (rest[0] != ":" or bool(self._get(name)))
        if sign == "+":
            return self.text(default) if has_value else ""
        if has_value:
            return self._get(name)
        if sign == "?":
            return self._not_known(f"${name}")
        if sign == "=":
            self.variables[name] = self.text(default)
        return self.text(default)

    def _is_set(self, name: str) -> bool:
        return int(name) <= len(self.arguments) if name.isdigit() else name in "@*#" or name in self.variables

    def _get(self, name: str) -> Value:
        if name in ("@", "*"):
            return list(self.arguments)
        if name == "#":
            return str(len(self.arguments))
        if name in ("0", "BASH_SOURCE"):
            return self.script
        if name.isdigit():
            return self.arguments[int(name) - 1] if self._is_set(name) else ""
        if name == "PWD":
            return str(Path.cwd())
        return self.variables[name] if name in self.variables else self._not_known(f"${name}")

    def _not_known(self, what: str) -> str:
        if what not in ("$?", "$$", "$!"):
            self.unknown[what] = None
        return ""

    def _arithmetic(self, raw: str) -> str:
        text = re.sub(r"\b[A-Za-z_]\w*\b", lambda found: self.text(f"${found[0]}") or "0", self.text(raw))
        try:
            return str(_compute(ast.parse(text.strip() or "0", mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError):
            return self._not_known(f"$(({raw.strip()}))")

    def _command(self, raw: str) -> str:
        """What `pwd`, `date`, `basename`, `dirname` and `cd FOLDER && pwd` print. Nothing is run."""
        words = self.words(_raw_words(re.sub(r"\d?>\s*\S+", "", raw)))
        words = [word for word in words if word != "--"]
        match words:
            case ["pwd"]:
                return str(Path.cwd())
            case ["cd", folder, "&&", "pwd"]:
                return str(Path(folder).resolve())
            case ["date", *formats]:
                return time.strftime((formats or ["+%c"])[0].lstrip("+"))
            case ["basename", path, *suffix]:
                return Path(path).name.removesuffix("".join(suffix))
            case ["dirname", path]:
                return str(Path(path).parent)
            case ["echo", *rest]:
                return " ".join(rest)
        if len(words) == 1 and self.functions.get(words[0]):
            return self._command(" ".join(self.functions[words[0]][-1].words))
        return self._not_known(f"$({raw.strip()})")


def _is_empty_array(pieces: list[tuple[Value, bool]]) -> bool:
    """`"$@"` without arguments is no word at all, and not an empty one."""
    return any(piece == [] for piece, _ in pieces) and not any(piece for piece, _ in pieces)


def _raw_words(raw: str) -> list[str]:
    """Split at white space outside quotes and brackets. Comments end with their line."""
    words, word, at = [], "", 0
    while at < len(raw):
        if raw[at].isspace() or raw.startswith("\\\n", at):
            words.append(word)
            word, at = "", at + (1 if raw[at].isspace() else 2)
        elif raw[at] == "#" and not word:
            newline = raw.find("\n", at)
            at = len(raw) if newline < 0 else newline
        else:
            end = bracket_end(raw, at) if raw[at] == "(" else span(raw, at)
            word, at = word + raw[at:end], end
    return [found for found in [*words, word] if found]


def _changed(value: str, rest: str) -> str:
    """`${name##*/}`, `${name%.sh}`, `${name//a/b}`, `${name,,}`."""
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    if rest.startswith("/"):
        old, _, new = rest.lstrip("/").partition("/")
        return value.replace(old, new) if rest.startswith("//") else value.replace(old, new, 1)
    pattern = rest.lstrip("#%")
    num_signs = len(rest) - len(pattern)
    if rest[:1] == "#":
        cuts = [end for end in range(len(value) + 1) if fnmatch.fnmatchcase(value[:end], pattern)]
        return value[(max(cuts) if num_signs == 2 else min(cuts)) :] if cuts else value
    if rest[:1] == "%":
        cuts = [start for start in range(len(value) + 1) if fnmatch.fnmatchcase(value[start:], pattern)]
        return value[: (min(cuts) if num_signs == 2 else max(cuts))] if cuts else value
    return value


def _compute(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_compute(node.left), _compute(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_compute(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError("not arithmetic")
