"""`penstock init`: write the configuration of a new run."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.cli.parser import Parser, interruptible, whole_number
from penstock.errors import ConfigError
from penstock_tools.starter import ALGORITHMS, BUILT_IN_REWARDS, Answers, starter_config

PLACEMENTS = ("standalone", "split-collocate")


def main(argv: Sequence[str]) -> int:
    """Write the configuration of a new run. Without options it asks, on a terminal."""
    args = _init_parser().parse_args(argv)
    file: Path = args.file
    if file.exists() and not args.force:
        raise ConfigError(f"{file} exists; choose another name, or overwrite it with --force")
    given = {name: value for name, value in vars(args).items() if name not in ("file", "force") and value is not None}
    with interruptible("before it wrote the file"):
        answers = _from_options(file, given) if given or not sys.stdin.isatty() else _ask(file)
    text = starter_config(answers, str(file))
    _check(text, file)
    try:
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    print(f"wrote {file}; check it with `penstock up {file} --check`, and start the run with `penstock up {file}`")
    return 0


def _init_parser() -> Parser:
    parser = Parser(
        prog="penstock init",
        description="Write the configuration of a new run: a short YAML file with comments. Without options it asks.",
        epilog="`penstock plan --config FILE --gpu NAME` says whether the run fits on its GPUs.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML file to write")
    for name, (text, options, default, _) in _QUESTIONS.items():
        shown = f" (default: {default})" if default else ""
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"{text}{shown}", **options)
    parser.add_argument("--run", metavar="NAME", help="name of the run (default: the name of the file)")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    return parser


def _from_options(file: Path, given: dict[str, Any]) -> Answers:
    if "model" not in given:
        raise ConfigError("--model is missing; give the folder or the Hub id of the model to train")
    return Answers(**{"run": _run_name(file), "gpus": _num_gpus_here(), **given})


def _ask(file: Path) -> Answers:
    """Ask for everything, with a default where there is one. A wrong answer is asked for again."""
    print("Enter accepts the value in brackets.")
    answers: dict[str, Any] = {"run": _run_name(file)}
    for name, (text, _, default, parse) in _QUESTIONS.items():
        if name == "placement" and (answers["gpus"] < 2 or len(ALGORITHMS[answers["algorithm"]].roles) == 1):
            continue
        offered = _derived_default(name, answers) or default
        answers[name] = _answer(text[0].upper() + text[1:], offered, parse)
    return Answers(**answers)


def _derived_default(name: str, answers: dict[str, Any]) -> str:
    """The default of a question that depends on this machine or on other answers; empty for the other questions."""
    if name == "gpus":
        return str(_num_gpus_here())
    if name not in ("max_tokens", "steps", "lr"):
        return ""
    known = Answers(**answers)
    return f"{ {'max_tokens': known.longest_response, 'steps': known.steps, 'lr': known.learning_rate}[name]:g}"


def _answer(question: str, default: str, parse: Callable[[str], Any]) -> Any:
    while True:
        try:
            text = input(f"{question} [{default}]: " if default else f"{question}: ").strip() or default
        except EOFError as error:
            raise KeyboardInterrupt from error
        try:
            return parse(text)
        except (argparse.ArgumentTypeError, ValueError) as error:
            print(f"  {error}")


def _check(text: str, file: Path) -> None:
    """Make the checks of a start that need no other process and no lookup on the Hub, before the file is written."""
    from penstock.config.dataset import listed_files
    from penstock.config.loading import parse_config
    from penstock.hub import is_hub_id
    from penstock.start_checks import check_datasets, check_lengths, check_model, check_rewards

    config = parse_config(text, str(file))
    if not is_hub_id(config.model.path):
        check_model(config)
    check_rewards(config.rollout.reward)
    files = [*listed_files(config.dataset.file), *listed_files(config.dataset.validation.file)]
    if not any(is_hub_id(entry.file) for entry in files):
        check_datasets(config)
    check_lengths(config)


def _run_name(file: Path) -> str:
    """The file's name as that of a run: `My run.yaml` is `my-run`."""
    return re.sub(r"[^a-z0-9_-]+", "-", file.stem.lower()).strip("-_")[:63] or "run"


def _num_gpus_here() -> int:
    from penstock.machine import visible_gpus

    return len(visible_gpus())


def _path(text: str) -> str:
    """The answer to a question for a path or Hub id. `none` and `auto` are empty, and built-in rewards pass."""
    from penstock.hub import is_hub_id

    if text in ("none", "auto"):
        return ""
    if not text or not (text in BUILT_IN_REWARDS or Path(text).exists() or is_hub_id(Path(text))):
        raise argparse.ArgumentTypeError(f"{text or 'an empty name'} does not exist")
    return text


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


_COUNT, _NUMBER = {"type": whole_number(0), "metavar": "N"}, {"type": whole_number(1), "metavar": "N"}
_NAMES = tuple(ALGORITHMS)
_QUESTIONS: dict[str, tuple[str, dict[str, Any], str, Callable[[str], Any]]] = {
    "model": ("model to train: a folder, or an id of the Hugging Face Hub", {}, "", _path),
    "data": ("dataset to train on; without one, clients submit prompts", {}, "none", _path),
    "validation": ("held-out dataset, scored every 25 steps", {"metavar": "DATA"}, "none", _path),
    "reward": (
        "reward: a Python file, gsm8k, math, code, exact_match, or auto (by data source)", {}, "auto", _path
    ),
    "algorithm": (f"algorithm: {', '.join(_NAMES)}", {"choices": _NAMES, "metavar": "NAME"}, "grpo", _one_of(_NAMES)),
    "gpus": ("GPUs to use", _COUNT, "all of this machine", whole_number(0)),
    "placement": (
        "placement: split-collocate (policy and reference share GPUs), or standalone", {"choices": PLACEMENTS},
        "split-collocate", _one_of(PLACEMENTS),
    ),
    "max_tokens": ("longest response, in tokens", _NUMBER, "at most 1024", whole_number(1)),
    "steps": ("training steps", _NUMBER, "100", whole_number(1)),
    "lr": ("learning rate", {"type": float}, "that of the preset", float),
}  # fmt: skip
"""The help and question, the option, the default and the parser of an answer."""
