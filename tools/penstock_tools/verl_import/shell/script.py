"""Finds the verl commands of a shell script by following its assignments, conditions and functions. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock_tools.verl_import.shell.expansion import Expansion
from penstock_tools.verl_import.shell.words import Statement, split_statements

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
