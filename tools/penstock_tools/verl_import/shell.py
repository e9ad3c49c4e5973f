"""Finds the verl commands of a shell script by following its assignments, conditions and functions. Nothing is run.

text -> statements and raw words -> `Expansion`: words with their variables replaced -> `VerlCommand`s
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*\+?)=(?P<value>.*)", re.DOTALL)
_ENTRY = re.compile(
    r"(?:^|[./])(?:main_(?P<program>ppo|dapo|generation(?:_server)?|eval)\w*?|(?P<sft>fsdp_sft|sft)_trainer(?:_ray)?)(?:\.py)?$"
)
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_MAX_CALLS = 50


@dataclass
class VerlCommand:
    """A command that starts verl: its program (`ppo`, `generation`, `eval`, `sft` …) and the words after it."""

    program: str
    words: list[str]


def read_script(text: str, path: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ScriptReader:
    """Follow a script. `commands` of the result are what it starts."""
    reader = ScriptReader(Expansion(environment, arguments, path))
    reader.follow(split_statements(text))
    return reader


def find_command(words: Sequence[str]) -> VerlCommand | None:
    """The verl program that a command starts, if it does: `python3 -m verl.trainer.main_ppo a=b`."""
    for index, word in enumerate(words):
        found = _ENTRY.search(word)
        if found is not None and "=" not in word:
            return VerlCommand(found["program"] or found["sft"], list(words[index + 1 :]))
    return None


# ── statements and words, without expanding anything ──

_OPERATOR = re.compile(r"&&|\|\||;;|[;|&\n()]")
_SKIPPED = re.compile(r"\\\n|#[^\n]*")
_REDIRECTION = re.compile(r"\d*&?[<>]+[&|]?-?[ \t]*")
_CLOSING = {"(": ")", "{": "}"}
_BLOCKS = {"case": "esac", "{": "}"}
_KEYWORDS = ("if", "then", "elif", "else", "fi", "while", "do", "done", "esac", "{", "}", "!")


@dataclass
class Statement:
    """The raw words of a simple command, or one keyword, and the operator in front of it: `;`, `&&` or `||`."""

    words: list[str] = field(default_factory=list)
    operator: str = ";"


def split_statements(script: str) -> list[Statement]:
    """The statements of a script. A keyword is a separate statement."""
    statements = [Statement()]
    for part in _tokens(script):
        words, before = statements[-1].words, statements[-1].operator
        if _OPERATOR.fullmatch(part):
            statements.append(Statement(operator=part if part in ("&&", "||") else ";"))
        elif part == "{" and words and (words[0] == "function" or words[-1].endswith("()")):
            statements += [Statement([part]), Statement()]
        else:
            words.append(part)
            if words[0] in _KEYWORDS and len(words) == 1:
                statements.append(Statement(operator=before))
    return [statement for statement in statements if statement.words]


def _tokens(script: str) -> Iterator[str]:
    """The raw words and the operators of a script. Comments, redirections and here-documents are skipped, and a
    subshell is read in place."""
    text, at, word = script.replace("\\\r\n", " ").replace("\r\n", "\n"), 0, ""
    delimiters: list[str] = []
    while at < len(text):
        end, found, skipped = at, _OPERATOR.match(text, at), _SKIPPED.match(text, at)
        if skipped and not (word and text[at] == "#"):
            end = skipped.end()
        elif (not word or word.isdigit()) and (redirection := _REDIRECTION.match(text, at)):
            word, end = "", redirection.end()
            while end < len(text) and not text[end].isspace() and text[end] not in ";|&)":
                end = span(text, end)
            if re.match(r"<<(?!<)", redirection[0]):
                delimiters.append(text[redirection.end() : end].strip("'\"-"))
        elif text[at] == "(" and (re.fullmatch(r"\w+\+?=", word) or text.startswith(("()", "(("), at)):
            end = bracket_end(text, at)  # an array, the `()` of a function, or an arithmetic command
            word += text[at:end]
        elif found is not None or text[at].isspace() or text[at] in "<>":
            if word:
                yield word
            word, end = "", at if text[at] in "<>" else at + 1
            if found is not None:
                end = found.end()
                yield ";" if found[0] in "()" else found[0]
                if found[0] == "\n":
                    end, delimiters = _after_documents(text, end, delimiters), []
        else:
            end = span(text, at)
            word += text[at:end]
        at = end
    if word:
        yield word


def _after_documents(text: str, at: int, delimiters: list[str]) -> int:
    """The end of the here-documents that begin at `at`."""
    for delimiter in delimiters:
        found = re.compile(rf"^\s*{re.escape(delimiter)}$", re.MULTILINE).search(text, at)
        at = len(text) if found is None else found.end()
    return at


def span(text: str, start: int) -> int:
    """The end of the quoted text, bracket or character that starts at `start`."""
    letter = text[start]
    if letter == "\\":
        return min(start + 2, len(text))
    if letter == "'":
        return min(f"{text}'".index("'", start + 1) + 1, len(text))
    if letter in '"`':
        end = start + 1
        while end < len(text) and text[end] != letter:
            end = span(text, end) if text[end] in "\\$" else end + 1
        return min(end + 1, len(text))
    if letter == "$" and text[start + 1 : start + 2] in _CLOSING:
        return bracket_end(text, start + 1)
    return start + 1


def bracket_end(text: str, start: int) -> int:
    opening, closing, depth, end = text[start], _CLOSING[text[start]], 0, start
    while end < len(text):
        depth += (text[end] == opening) - (text[end] == closing)
        if depth == 0:
            return end + 1
        if opening == "(" and text[end] == "#" and text[end - 1].isspace():  # a comment may have quotes and brackets
            end = f"{text}\n".index("\n", end)
        else:
            end = span(text, end) if text[end] in "\\'\"`$" else end + 1
    return len(text)


# ── following ──


class ScriptReader:
    def __init__(self, expansion: Expansion) -> None:
        self.expansion = expansion
        self.unknown = expansion.unknown
        self.commands: list[VerlCommand] = []
        self.skipped: list[str] = []
        """Parts of the script that are not followed."""
        self.status = True
        self.num_calls = 0

    def follow(self, statements: list[Statement]) -> None:
        """Follow statements; of each `if`, the first branch whose condition holds."""
        branches: list[str] = []  # of each `if` around a statement: its condition, followed, skipped, or done
        at = 0
        while at < len(statements):
            words, is_followed = statements[at].words, {"skipped", "done"}.isdisjoint(branches)
            match words[0], branches[-1:]:
                case "if", _:
                    branches.append("condition" if is_followed else "done")
                    self.status = self.status or is_followed
                case "fi", [_]:
                    branches.pop()
                case "then", ["condition"]:
                    branches[-1] = "followed" if self.status else "skipped"
                case "elif", ["skipped"]:
                    branches[-1], self.status = "condition", True
                case "else", ["skipped"]:
                    branches[-1] = "followed"
                case "elif" | "else", ["followed"]:
                    branches[-1] = "done"
                case _ if not is_followed:
                    pass
                case "case", _:
                    self.skipped.append(f"`{' '.join(words[:3])}` is not followed")
                    at = _block_end(statements, at)
                case _ if (name := _function_name(words)) and statements[at + 1 :][:1] == [Statement(["{"])]:
                    end = _block_end(statements, at + 1)
                    self.expansion.functions[name] = statements[at + 2 : end]
                    at = end
                case _:
                    self._statement(statements[at])
            at += 1

    def _statement(self, statement: Statement) -> None:
        words = statement.words
        is_skipped = statement.operator != ";" and self.status != (statement.operator == "&&")
        if is_skipped or words[0] in _KEYWORDS:
            return
        if words[0] == "for":  # a loop is followed once, with its first value
            values = self.expansion.words(words[3:]) if words[2:3] == ["in"] else []
            if values:
                self.expansion.variables[words[1]] = values[0]
            if len(values) > 1:
                self.skipped.append(f"the loop over {words[1]} is followed once, with {values[0]!r}")
            return
        if words[0] in ("[", "[[", "test") or words[-1] == "]]":
            inner = [word for word in words if word not in ("[", "[[", "test", "]", "]]")]
            is_wanted = inner[:1] != ["!"]
            values = [self.expansion.text(word) for word in inner[0 if is_wanted else 1 :]]
            self.status = _holds(values) == is_wanted
            return
        self.status = True
        declared = words[1:] if words[0] in _DECLARATIONS else words
        found = [_ASSIGNMENT.fullmatch(word) for word in declared if not word.startswith("-")]
        if all(found) or words[0] in _DECLARATIONS:
            for assignment in filter(None, found):
                self.expansion.assign(assignment["name"], assignment["value"])
        else:
            self._command(self.expansion.words(words))

    def _command(self, words: list[str]) -> None:
        if words and words[0] in self.expansion.functions and self.num_calls < _MAX_CALLS:
            self.num_calls += 1
            before, self.expansion.arguments = self.expansion.arguments, words[1:]
            self.follow(self.expansion.functions[words[0]])
            self.expansion.arguments = before
        elif words and words[0] == "shift":
            del self.expansion.arguments[: int(words[1]) if len(words) > 1 and words[1].isdigit() else 1]
        elif command := find_command(words):
            self.commands.append(command)


_UNARY: dict[str, Callable[[str], bool]] = {
    "-z": operator.not_, "-n": bool, "-f": lambda path: Path(path).is_file(), "-d": lambda path: Path(path).is_dir(),
    "-e": lambda path: Path(path).exists(),
}  # fmt: skip
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip


def _holds(values: list[str]) -> bool:
    match values:
        case [name, text] if name in _UNARY:
            return _UNARY[name](text)
        case [left, "=" | "==" | "!=" as sign, right]:
            return (left == right) == (sign != "!=")
        case [left, name, right] if name in _COMPARISONS:
            is_numeric = left.lstrip("-").isdigit() and right.lstrip("-").isdigit()
            return is_numeric and _COMPARISONS[name](int(left), int(right))
    return len(values) == 1 and bool(values[0])


def _block_end(statements: list[Statement], start: int) -> int:
    opening, depth = statements[start].words[0], 0
    for index in range(start, len(statements)):
        word = statements[index].words[0]
        depth += (word == opening) - (word == _BLOCKS[opening])
        if depth == 0:
            return index
    return len(statements) - 1


def _function_name(words: list[str]) -> str:
    """The name of the function that these words define if a block follows, or an empty text."""
    name = words[1] if words[0] == "function" and len(words) > 1 else words[0]
    return name.removesuffix("()") if words[0] == "function" or name.endswith("()") else ""


# ── variables, defaults, arrays, arithmetic, and the few commands that make names and paths ──

Value = str | list[str]
_NAME = re.compile(r"\d|\w+|[@*#?$!]")
_PARAMETER = re.compile(r"(?P<count>#?)(?P<name>\w+|[@*#])(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)", re.DOTALL)
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv, ast.Pow: operator.pow,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip


class Expansion:
    """The variables of a script. `unknown` collects what could not be computed, and counts as empty: names that nothing
    sets, commands that are not run."""

    def __init__(self, environment: Mapping[str, str], arguments: Sequence[str], script: str) -> None:
        self.variables: dict[str, Value] = dict(environment)
        self.arguments = list(arguments)
        self.script = script
        self.unknown: list[str] = []
        self.functions: dict[str, list[Statement]] = {}

    def words(self, raw: Sequence[str]) -> list[str]:
        return [word for part in raw for word in self._split(part)]

    def text(self, raw: str) -> str:
        """One word, as on the right of an assignment, where nothing is split."""
        return "".join(piece if isinstance(piece, str) else " ".join(piece) for piece, _ in self._pieces(raw))

    def assign(self, name: str, raw: str) -> None:
        """`name+` adds to what the variable has."""
        name, adds = name.removesuffix("+"), name.endswith("+")
        before = self.variables.get(name, "") if adds else ""
        if raw.startswith("(") and raw.endswith(")"):
            old = ([before] if before else []) if isinstance(before, str) else before
            self.variables[name] = [*old, *self.words(_raw_words(raw[1:-1]))]
        else:
            self.variables[name] = (before if isinstance(before, str) else " ".join(before)) + self.text(raw)

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

    def _pieces(self, raw: str, *, in_quotes: bool = False) -> list[tuple[Value, bool]]:
        """The parts of a word, each with whether it is literal or quoted, so that white space does not split it."""
        pieces: list[tuple[Value, bool]] = []
        at = 0
        while at < len(raw):
            letter, end = raw[at], span(raw, at)
            if letter in "$`":
                value, end = self._dollar(raw, at)
                pieces.append((value, in_quotes))
            elif letter == "\\" and (not in_quotes or raw[at + 1 : at + 2] in tuple('"\\$`\n')):
                pieces.append((raw[at + 1 : end].replace("\n", ""), True))
            elif letter == "'" and not in_quotes:
                pieces.append((raw[at + 1 : end - 1], True))
            elif letter == '"' and not in_quotes:
                inner = self._pieces(raw[at + 1 : end - 1], in_quotes=True)
                # `"$@"` without arguments is not a word, not even an empty one.
                is_empty_array = any(piece == [] for piece, _ in inner) and not any(piece for piece, _ in inner)
                pieces += [] if is_empty_array else [("", True), *inner]
            else:
                pieces.append((letter, True))
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
        return ("$", at + 1) if name is None else (self._get(name[0]), name.end())

    def _parameter(self, inner: str) -> Value:
        found = _PARAMETER.fullmatch(inner)
        if found is None:
            return self._not_known(f"${{{inner}}}")
        name, index, rest = found["name"], found["index"], found["rest"]
        if rest.startswith((":-", ":=", "-", "=", ":+", "+", ":?", "?")):
            return self._or_default(name, rest)
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

    def _or_default(self, name: str, rest: str) -> Value:
        sign, default = (rest[1], rest[2:]) if rest[0] == ":" else (rest[0], rest[1:])
        has_value = self._is_set(name) and (rest[0] != ":" or bool(self._get(name)))
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
        special: dict[str, Value] = {
            "@": list(self.arguments), "*": list(self.arguments), "#": str(len(self.arguments)), "0": self.script,
            "BASH_SOURCE": self.script, "PWD": str(Path.cwd()),
        }  # fmt: skip
        if name in special:
            return special[name]
        if name.isdigit():
            return self.arguments[int(name) - 1] if self._is_set(name) else ""
        return self.variables[name] if name in self.variables else self._not_known(f"${name}")

    def _not_known(self, what: str) -> str:
        if what not in ("$?", "$$", "$!", *self.unknown):
            self.unknown.append(what)
        return ""

    def _arithmetic(self, raw: str) -> str:
        text = re.sub(r"\b[A-Za-z_]\w*\b", lambda found: self.text(f"${found[0]}") or "0", self.text(raw))
        try:
            return str(_compute(ast.parse(text.strip() or "0", mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError):
            return self._not_known(f"$(({raw.strip()}))")

    def _command(self, raw: str) -> str:
        """What `pwd`, `date`, `basename`, `dirname` and `cd FOLDER && pwd` print. Nothing is run."""
        match [word for word in self.words(_raw_words(raw)) if word != "--"]:
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
            case [name] if self.functions.get(name):
                return self._command(" ".join(self.functions[name][-1].words))
        return self._not_known(f"$({raw.strip()})")


def _raw_words(raw: str) -> list[str]:
    """The raw words and operators of the inside of brackets, which may be on several lines."""
    return [part for part in _tokens(raw) if part != "\n"]


def _changed(value: str, rest: str) -> str:
    """`${name##*/}`, `${name%.sh}`, `${name//a/b}`, `${name,,}`."""
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    if rest.startswith("/"):
        old, _, new = rest.lstrip("/").partition("/")
        return value.replace(old, new) if rest.startswith("//") else value.replace(old, new, 1)
    pattern, parts = rest.lstrip("#%"), [(value[:at], value[at:]) for at in range(len(value) + 1)]
    if rest.startswith("%"):
        parts = [(end, start) for start, end in parts]
    kept = [left for cut, left in parts if rest[:1] in ("#", "%") and fnmatch.fnmatchcase(cut, pattern)]
    return (min if len(rest) - len(pattern) == 2 else max)(kept or [value], key=len)


def _compute(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_compute(node.left), _compute(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_compute(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError("not arithmetic")
