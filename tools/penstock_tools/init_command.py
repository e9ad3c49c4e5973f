"""`penstock init`: write the configuration of a new run."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.cli.parser import Parser, interruptible
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
    parser.add_argument("--model", help="model to train: a folder, or an id of the Hugging Face Hub")
    parser.add_argument(
        "--data", help="dataset to train on: a file, a folder or a Hub id (default: none, clients submit prompts)"
    )
    parser.add_argument("--validation", metavar="DATA", help="held-out dataset, scored every 25 steps (default: none)")
    parser.add_argument(
        "--reward",
        help="Python file with compute_score, or gsm8k, math, code or exact_match (default: by data source)",
    )
    parser.add_argument("--algorithm", choices=tuple(ALGORITHMS), help="default: grpo")
    parser.add_argument("--gpus", type=_count, metavar="N", help="GPUs to use (default: all of this machine)")
    parser.add_argument("--placement", choices=PLACEMENTS, help="default: split-collocate if models share GPUs")
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="longest response (default: at most 1024)")
    parser.add_argument("--steps", type=_positive, metavar="N", help="training steps (default: 100)")
    parser.add_argument("--lr", type=float, help="learning rate (default: that of the preset, 1e-6)")
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
    here = _num_gpus_here()
    answers: dict[str, Any] = {
        "run": _run_name(file),
        "model": _answer("Model to train: a folder, or an id of the Hugging Face Hub", "", _existing),
        "data": _answer("Dataset to train on (none: clients submit prompts)", "none", _file),
        "validation": _answer("Held-out dataset for validation", "none", _file),
        "reward": _answer(
            "Reward: a Python file, gsm8k, math, code, exact_match, or auto (by data source)", "auto", _reward
        ),
        "algorithm": _answer(f"Algorithm: {', '.join(tuple(ALGORITHMS))}", "grpo", _one_of(tuple(ALGORITHMS))),
        "gpus": _answer("GPUs to use", str(here), _count),
    }
    if answers["gpus"] > 1 and len(ALGORITHMS[answers["algorithm"]].roles) > 1:
        question = "Placement: split-collocate (policy and reference share GPUs), or standalone"
        answers["placement"] = _answer(question, "split-collocate", _one_of(PLACEMENTS))
    default = Answers(**answers)
    answers["max_tokens"] = _answer("Longest response, in tokens", str(default.longest_response), _positive)
    answers["steps"] = _answer("Training steps", str(default.steps), _positive)
    answers["lr"] = _answer("Learning rate", f"{default.learning_rate:g}", float)
    return Answers(**answers)


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
    """Make the checks of a start that need no other process, so that mistakes show before the file is written.

    Nothing is looked up on the Hub: `penstock up --check` does that."""
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


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _existing(text: str) -> str:
    from penstock.hub import is_hub_id

    if not text or not (Path(text).exists() or is_hub_id(Path(text))):
        raise argparse.ArgumentTypeError(f"{text or 'an empty name'} does not exist")
    return text


def _file(text: str) -> str:
    return "" if text == "none" else _existing(text)


def _reward(text: str) -> str:
    return "" if text == "auto" else text if text in BUILT_IN_REWARDS else _existing(text)


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse
