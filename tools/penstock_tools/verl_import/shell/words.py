"""Splits a shell script into statements and words, without expanding anything."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
    """Comments, redirections and here-documents are left out. A keyword is a statement of its own."""
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
