"""Finds the verl commands of a shell script by following its assignments, conditions and functions. Nothing is run.

text -> statements and raw words -> `Expansion`: words with their variables replaced -> `VerlCommand`s
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*\+?)=(?P<value>.*)", re.DOTALL)
_ENTRY = re.compile(
    r"(?:^|[./])(?:main_(?P<program>ppo|dapo|generation|eval)\w*?|(?P<sft>fsdp_sft|sft)_trainer(?:_ray)?)(?:\.py)?$"
)
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_MAX_CALLS = 50


@dataclass
class VerlCommand:
    """A command that starts verl: its program (`ppo`, `generation`, `eval`, `sft` …) and the words after it."""

    program: str
    words: list[str]


@dataclass
class ReadScript:
    commands: list[VerlCommand] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Variables and commands that the script uses and that are not known here. They count as empty."""
    skipped: list[str] = field(default_factory=list)
    """Parts of the script that are not followed."""


def read_script(text: str, path: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ReadScript:
    reader = _Reader(Expansion(environment, arguments, path))
    reader.follow(split_statements(text))
    return ReadScript(reader.commands, list(reader.expansion.unknown), reader.skipped)


def find_command(words: Sequence[str]) -> VerlCommand | None:
    """The verl program that a command starts, if it does: `python3 -m verl.trainer.main_ppo a=b`."""
    for index, word in enumerate(words):
        found = _ENTRY.search(word)
        if found is not None and "=" not in word:
            return VerlCommand(found["program"] or found["sft"], list(words[index + 1 :]))
    return None


class _Reader:
    def __init__(self, expansion: Expansion) -> None:
        self.expansion = expansion
        self.commands: list[VerlCommand] = []
        self.skipped: list[str] = []
        self.status = True
        self.num_calls = 0

    def follow(self, statements: list[Statement]) -> None:
        at = 0
        while at < len(statements):
            word = statements[at].words[0]
            if word == "if":
                at = self._if(statements, at)
            elif word == "case":
                end = _matching(statements, at, "case", "esac")
                self.skipped.append(f"line {statements[at].line}: `case` is not followed")
                at = end
            elif name := _function_name(statements, at):
                start = next(index for index in range(at, len(statements)) if statements[index].words[0] == "{")
                end = _matching(statements, start, "{", "}")
                self.expansion.functions[name] = statements[start + 1 : end]
                at = end
            else:
                self._statement(statements[at])
            at += 1

    def _if(self, statements: list[Statement], start: int) -> int:
        """Follow the first branch whose condition holds. Returns the index of `fi`."""
        end = _matching(statements, start, "if", "fi")
        parts: list[tuple[str, list[Statement]]] = []
        depth = 0
        for statement in statements[start:end]:
            word = statement.words[0]
            if (word == "if" and depth == 0) or (depth == 1 and word in ("then", "elif", "else")):
                parts.append((word, []))
            else:
                parts[-1][1].append(statement)
            depth += {"if": 1, "fi": -1}.get(word, 0)
        holds = False
        for word, inner in parts:
            if word in ("if", "elif"):
                self.status = True
                self.follow(inner)
                holds = self.status
            elif word == "else" or holds:
                self.follow(inner)
                break
        return end

    def _statement(self, statement: Statement) -> None:
        if statement.operator != ";" and self.status != (statement.operator == "&&"):
            return
        words = statement.words
        if words[0] in ("then", "do", "done", "else", "{", "}", "!", "while", "fi", "esac"):
            return
        if words[0] == "for":
            self._for(words)
            return
        if words[0] in ("[", "[[", "test") or words[-1] == "]]":
            self.status = self._test(words)
            return
        declared = words[1:] if words[0] in _DECLARATIONS else words
        found = [_ASSIGNMENT.fullmatch(word) for word in declared if not word.startswith("-")]
        if all(found) or words[0] in _DECLARATIONS:
            for assignment in filter(None, found):
                self.expansion.assign(assignment["name"], assignment["value"])
            self.status = True
            return
        self._command(self.expansion.words(words))

    def _command(self, words: list[str]) -> None:
        self.status = True
        if words and words[0] in self.expansion.functions and self.num_calls < _MAX_CALLS:
            self.num_calls += 1
            before, self.expansion.arguments = self.expansion.arguments, words[1:]
            self.follow(self.expansion.functions[words[0]])
            self.expansion.arguments = before
        elif words and words[0] == "shift":
            del self.expansion.arguments[: int(words[1]) if len(words) > 1 and words[1].isdigit() else 1]
        elif command := find_command(words):
            self.commands.append(command)

    def _for(self, words: list[str]) -> None:
        """A loop is followed once, with its first value."""
        values = self.expansion.words(words[3:]) if words[2:3] == ["in"] else []
        if values:
            self.expansion.variables[words[1]] = values[0]
            if len(values) > 1:
                self.skipped.append(f"the loop over {words[1]} is followed once, with {values[0]!r}")

    def _test(self, words: list[str]) -> bool:
        inner = [word for word in words if word not in ("[", "[[", "test", "]", "]]")]
        is_wanted = inner[:1] != ["!"]
        values = [self.expansion.text(word) for word in inner[0 if is_wanted else 1 :]]
        return _holds(values) == is_wanted


def _holds(values: list[str]) -> bool:
    match values:
        case ["-z", text]:
            return not text
        case ["-n", text]:
            return bool(text)
        case ["-f", path]:
            return Path(path).is_file()
        case ["-d", path]:
            return Path(path).is_dir()
        case ["-e", path]:
            return Path(path).exists()
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
        case [left, ("-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge") as name, right]:
            return _compare(left, name, right)
    return len(values) == 1 and bool(values[0])


def _compare(left: str, name: str, right: str) -> bool:
    if not (left.lstrip("-").isdigit() and right.lstrip("-").isdigit()):
        return False
    a, b = int(left), int(right)
    return {"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b}[name]


def _matching(statements: list[Statement], start: int, opening: str, closing: str) -> int:
    """The index of the statement that closes the one at `start`."""
    depth = 0
    for index in range(start, len(statements)):
        word = statements[index].words[0]
        depth += (word == opening) - (word == closing)
        if depth == 0:
            return index
    return len(statements) - 1


def _function_name(statements: list[Statement], at: int) -> str:
    """The name of the function that is defined here, or an empty text."""
    words = statements[at].words
    is_block = any(found.words[0] == "{" for found in statements[at + 1 : at + 2]) or words[-1] == "{"
    if not is_block:
        return ""
    if words[0] == "function" and len(words) > 1:
        return words[1].removesuffix("()")
    return words[0].removesuffix("()") if words[0].endswith("()") else ""


# ── statements and words, without expanding anything ──

_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "\n")
_CLOSING = {"(": ")", "{": "}"}
KEYWORDS = frozenset(("if", "then", "elif", "else", "fi", "for", "while", "do", "done", "case", "esac", "{", "}", "!"))


@dataclass
class Statement:
    """The raw words of a simple command, or one keyword, and the operator in front of it."""

    words: list[str] = field(default_factory=list)
    operator: str = ";"
    line: int = 0


def split_statements(script: str) -> list[Statement]:
    """Comments, redirections and here-documents are skipped. A keyword is a separate statement."""
    return _Splitter(script).split()


def span(text: str, start: int) -> int:
    """The end of the quoted text, bracket or character that starts at `start`."""
    letter = text[start]
    if letter == "\\":
        return min(start + 2, len(text))
    if letter == "'":
        return _after(text, text.find("'", start + 1))
    if letter in '"`':
        end = start + 1
        while end < len(text) and text[end] != letter:
            end = span(text, end) if text[end] in "\\$" else end + 1
        return min(end + 1, len(text))
    if letter == "$" and text[start + 1 : start + 2] in _CLOSING:
        return bracket_end(text, start + 1)
    return start + 1


def bracket_end(text: str, start: int) -> int:
    """The end of the bracket that opens at `start`."""
    opening, closing, depth, end = text[start], _CLOSING[text[start]], 0, start
    while end < len(text):
        if text[end] == opening:
            depth += 1
        elif text[end] == closing:
            depth -= 1
            if depth == 0:
                return end + 1
        end = span(text, end) if text[end] in "\\'\"`$" else end + 1
    return len(text)


def _after(text: str, found: int) -> int:
    return len(text) if found < 0 else found + 1


class _Splitter:
    def __init__(self, script: str) -> None:
        self.text = script.replace("\\\r\n", " ").replace("\r\n", "\n")
        self.at = 0
        self.line = 1
        self.word = ""
        self.current = Statement(line=1)
        self.statements: list[Statement] = []
        self.delimiters: list[str] = []
        """Ends of the here-documents that begin on this line."""

    def split(self) -> list[Statement]:
        while self.at < len(self.text):
            self._read()
        self._end_statement("\n")
        return self.statements

    def _read(self) -> None:
        text, at, letter = self.text, self.at, self.text[self.at]
        operator = next((found for found in _OPERATORS if text.startswith(found, at)), None)
        if text.startswith("\\\n", at):
            self._move(at + 2)
        elif letter == "#" and not self.word:
            self._move(_before_newline(text, at))
        elif letter in "<>" or (letter == "&" and text.startswith("&>", at)):
            self._redirection()
        elif operator is not None:
            self._end_statement(operator)
            self._move(at + len(operator))
            if operator == "\n" and self.delimiters:
                self._skip_documents()
        elif letter.isspace():
            self._end_word()
            self._move(at + 1)
        elif letter == "(":
            self._parenthesis()
        elif letter == ")":
            self._end_statement(";")
            self._move(at + 1)
        else:
            self._take(span(text, at))

    def _parenthesis(self) -> None:
        """An array (`A=(…`), an arithmetic command, the `()` of a function, or a subshell, which is read in place."""
        end = bracket_end(self.text, self.at)
        is_array = re.fullmatch(r"\w+\+?=", self.word) is not None
        if is_array or self.text.startswith(("()", "(("), self.at):
            self._take(end)
        else:
            self._end_statement(";")
            self._move(self.at + 1)

    def _redirection(self) -> None:
        """Skip `2>&1`, `> file`, `&> file` and `<<EOF`."""
        if self.word.isdigit():
            self.word = ""
        found = re.compile(r"&?[<>]+[&|]?-?[ \t]*").match(self.text, self.at)
        assert found is not None
        end = start = found.end()
        while end < len(self.text) and not self.text[end].isspace() and self.text[end] not in ";|&)":
            end = span(self.text, end)
        if found[0].startswith("<<") and not found[0].startswith("<<<"):
            self.delimiters.append(self.text[start:end].strip("'\"-"))
        self._move(end)

    def _skip_documents(self) -> None:
        for delimiter in self.delimiters:
            found = re.compile(rf"^\s*{re.escape(delimiter)}$", re.MULTILINE).search(self.text, self.at)
            self._move(len(self.text) if found is None else found.end())
        self.delimiters = []

    def _take(self, end: int) -> None:
        self.word += self.text[self.at : end]
        self._move(end)

    def _move(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def _end_word(self) -> None:
        if not self.word:
            return
        if self.word == "{" and self.current.words and self._defines_function():
            self.statements.append(self.current)
            self.current = Statement(operator=";", line=self.line)
        is_first = not self.current.words
        self.current.words.append(self.word)
        if is_first and (self.word in KEYWORDS) and self.word not in ("for", "case"):
            self._end_statement(self.current.operator, word_ended=True)
        self.word = ""

    def _defines_function(self) -> bool:
        return self.current.words[0] == "function" or self.current.words[-1].endswith("()")

    def _end_statement(self, operator: str, word_ended: bool = False) -> None:
        if not word_ended:
            self._end_word()
        if self.current.words:
            self.statements.append(self.current)
        follows = operator if operator in ("&&", "||") else ";"
        self.current = Statement(operator=follows, line=self.line)


def _before_newline(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found


# ── variables, defaults, arrays, arithmetic, and the few commands that make names and paths ──

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
    """`"$@"` without arguments is not a word at all, rather than an empty one."""
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
