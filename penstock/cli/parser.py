"""The command line of every command: options, overrides of the config, and Ctrl-C.

A mistake is one line with the nearest name that is meant, and exit code 2:

penstock top: error: unknown option --intervall; did you mean --interval?
penstock up: error: CONFIG is missing (YAML file of the run); see `penstock up --help`
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
EXIT_USAGE = 2
MAX_USAGE_LINES = 4
_KINDS = {"int": "a whole number", "float": "a number"}
_NEGATIVE_NUMBER = re.compile(r"-\d*\.?\d+([eE][-+]?\d+)?(:.*)?")


class HelpFormatter(argparse.HelpFormatter):
    """Leaves more room for options, so that fewer have their text on a separate line."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"max_help_position": 30, **options})


class RawHelpFormatter(HelpFormatter):
    """Keeps the lines of the description and of the epilog, and breaks only lines that are too long."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Called by argparse. The second column of a table of actions stays one."""
        lines = []
        for line in text.splitlines():
            column = re.match(r" +(?=\S)|\S+(?: \S+)*  +", line)
            further = " " * len(column[0]) if column else ""
            lines += textwrap.wrap(line, width, initial_indent=indent, subsequent_indent=indent + further) or [""]
        return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """Refuses abbreviated options, because `--run` is not short for `--run-dir`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": HelpFormatter, **options})

    def format_help(self) -> str:
        """The help, without the list of all options in the usage where that is long: they follow one by one."""
        if not self.usage and self.format_usage().count("\n") > MAX_USAGE_LINES:
            positionals = [action for action in self._actions if not action.option_strings]
            shown = [f"[{_name(action)} …]" if action.nargs in ("*", "?") else _name(action) for action in positionals]
            self.usage = " ".join(["%(prog)s", *shown, "[options]"])
        return super().format_help()

    @property
    def option_names(self) -> list[str]:
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {self._plain(message)}\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, extra = self.parse_known_args(args, namespace)
        if extra:
            self.error(f"unexpected {' '.join(map(repr, extra))}; {self._see_help}")
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Look for unknown options first: their values would be taken for arguments of the command."""
        words = list(sys.argv[1:] if args is None else args)
        self._refuse_unknown_options(words)
        return super().parse_known_args(words, namespace)

    @property
    def _see_help(self) -> str:
        return f"see `{self.prog} --help`"

    def _refuse_unknown_options(self, words: Sequence[str]) -> None:
        subparsers = (action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
        subcommands = next(subparsers, None) or ()
        # An argument may take all words after its first one, options too, such as another command's line.
        takes_rest = any(action.nargs == argparse.REMAINDER for action in self._actions)
        is_value = False
        for word in words:
            if word == "--" or word in subcommands:
                return
            name = word.partition("=")[0]
            if takes_rest and not is_value and not name.startswith("-"):
                return
            option = self._option_string_actions.get(word)
            is_value = not is_value and option is not None and option.nargs != 0
            is_option = len(name) > 1 and name.startswith("-") and not _NEGATIVE_NUMBER.fullmatch(word)
            if is_option and name not in self._option_string_actions:
                hint = did_you_mean(f"--{name.lstrip('-')}", self.option_names)
                self.error(f"unknown option {name}; {hint or self._see_help}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Called by argparse for a value that must be one of `action.choices`."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if action.option_strings:
            what = f"{action.option_strings[0]}: {value!r} is not a choice"
        else:
            what = f"unknown {_name(action).lower()} {value!r}"
        self.error(f"{what}; {did_you_mean(str(value), choices) or f'choose one of {listed(choices)}'}")

    def _plain(self, message: str) -> str:
        """The message of argparse in plain words. Messages of this class pass unchanged."""
        if required := re.fullmatch(r"the following arguments are required: (.*)", message):
            return self._missing(required[1].split(", "))
        if required := re.fullmatch(r"one of the arguments (.*) is required", message):
            return f"one of {listed(required[1].split(), 'or')} is missing; {self._see_help}"
        message = message.removeprefix("argument ")
        message = re.sub(r": expected (one|at least one) argument$", f" needs a value; {self._see_help}", message)
        message = re.sub(r": not allowed with argument (.*)$", r" cannot be combined with \1", message)
        return re.sub(r": invalid (int|float) value: (.*)$", lambda m: f": {m[2]} is not {_KINDS[m[1]]}", message)

    def _missing(self, names: Sequence[str]) -> str:
        actions = [one for one in self._actions if ("/".join(one.option_strings) or one.metavar or one.dest) in names]
        shown = [_name(action) for action in actions] or list(names)
        choices = next((list(map(str, action.choices)) for action in actions if action.choices), [])
        texts = [action.help for action in actions if action.help]
        if choices:
            about = f": give one of {listed(choices)}"
        else:
            about = f" ({texts[0]})" if len(shown) == len(texts) == 1 else ""
        return f"{listed(shown, 'and')} {'is' if len(shown) == 1 else 'are'} missing{about}; {self._see_help}"


def _name(action: argparse.Action) -> str:
    if action.option_strings:
        return action.option_strings[0]
    metavar = action.metavar if isinstance(action.metavar, str) else None
    return metavar or action.dest.upper()


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:

    def parse(text: str) -> int:
        if not re.fullmatch(r"[-+]?\d+", text):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
        if int(text) < least or (most is not None and int(text) > most):
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, not {text}")
        return int(text)

    return parse


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`did you mean …?` with the nearest known word; empty if none is near. One that begins with `word` is near."""
    known = list(known)
    begins = [name for name in known if len(word.lstrip("-")) > 1 and name.startswith(word)]
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=cutoff) or begins
    return f"did you mean {nearest[0]}?" if nearest else ""


def listed(words: Sequence[str], last: str = "or") -> str:
    """`a, b or c`."""
    *others, end = words
    return f"{', '.join(others)} {last} {end}" if others else end


def process_parser(name: str, description: str, example: str) -> Parser:
    """The parser of one process of a run, such as `gateway`. `example` overrides a field of its config."""
    epilog = f"Any config field can be overridden: {example}"
    parser = Parser(prog=f"penstock {name}", description=description, epilog=epilog)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    return parser


def parse_with_overrides(parser: Parser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the overrides: `--section.field value` and `--section.field=value`, in any order.

    A name that is neither an option nor a field of the config is refused, with the nearest known one."""
    options: list[str] = []
    overrides: list[str] = []
    words = list(sys.argv[1:] if argv is None else argv)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or name in parser.option_names or name == "--":
            options.append(word)
            continue
        _check_name(parser, name)
        overrides.append(word)
        if not equals and words and not words[0].startswith("--"):
            overrides.append(words.pop(0))
    return parser.parse_args(options), overrides


def _check_name(parser: Parser, name: str) -> None:
    if "." in name:
        return
    from penstock.config.run import RunConfig

    if name[2:].replace("-", "_") in RunConfig.model_fields:
        return
    if hint := did_you_mean(name, parser.option_names, cutoff=0.75):
        parser.error(f"unknown option {name}; {hint}")
    from penstock.config.loading import hint_for_key

    parser.error(f"unknown option {name}; {hint_for_key([name[2:].replace('-', '_')], RunConfig)}")


@contextmanager
def interruptible(text: str) -> Iterator[None]:
    """Within the block, Ctrl-C reports what it interrupted: `while it waited for Redis`. The innermost reports. Work
    whose own handler of Ctrl-C cancels it is interrupted too."""
    from asyncio import CancelledError

    try:
        yield
    except (KeyboardInterrupt, CancelledError) as interrupt:
        raise KeyboardInterrupt(str(interrupt) or text) from None


def run_interruptible(work: Coroutine[Any, Any, T], text: str) -> T:
    """Like `asyncio.run`, for work that may swallow a cancellation: Ctrl-C cancels it until it has ended."""
    import asyncio

    from penstock.cancellation import end_task

    async def supervised() -> T:
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            await end_task(task)
            raise
        return task.result()

    with interruptible(text):
        return asyncio.run(supervised())
