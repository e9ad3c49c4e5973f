"""Commands that prepare a run: `penstock init`, `keys` and `fetch-model`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.api_keys import SCOPES, make_key, read_keys
from penstock.cli.parser import Parser, interruptible
from penstock.config.starter import ALGORITHMS, BUILT_IN_REWARDS, Answers, starter_config
from penstock.errors import ConfigError, InvalidInput

PLACEMENTS = ("standalone", "split-collocate")


def init(argv: Sequence[str]) -> int:
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


# ── keys and models ──


def keys(argv: Sequence[str]) -> int:
    """Make and list the API keys of a gateway. A key is printed once; only its hash is stored."""
    parser = Parser(
        prog="penstock keys",
        description="Make and list the API keys of a gateway.",
        epilog="Example: penstock keys make --name alice --scope submit --file keys.txt",
    )
    actions = parser.add_subparsers(dest="action", required=True)
    make = actions.add_parser("make", help="make a key, print it, and add its hash to the file")
    make.add_argument("--name", required=True, help="who uses the key; appears in the audit log")
    make.add_argument(
        "--scope",
        choices=SCOPES,
        required=True,
        help="read: view only; submit: also submit prompts; admin: also change runs and policies",
    )
    listing = actions.add_parser("list", help="list names and scopes")
    for action in (make, listing):
        action.add_argument("--file", type=Path, required=True, help="file that gateway.keys_file names")
    if any(word.partition("=")[0] == "--role" for word in argv):
        raise InvalidInput("--role", "is called --scope")
    args = parser.parse_args(argv)
    if args.action == "list":
        for key in read_keys(args.file):
            print(f"{key.name}\t{key.scope}")
        return 0
    print(_make_key(args.file, args.name, args.scope))
    return 0


def _make_key(path: Path, name: str, scope: str) -> str:
    if path.exists() and path.read_text().strip() and any(key.name == name for key in read_keys(path)):
        raise InvalidInput(
            "--name", f"{path} already has a key {name!r}; choose another name, or remove its line first"
        )
    secret, key = make_key(name, next(known for known in SCOPES if known == scope))
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+") as file:
            ends_in_line = not (text := file.read()) or text.endswith("\n")
            file.write(("" if ends_in_line else "\n") + key.line + "\n")
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(f"--file {path} cannot be written: {error.strerror}") from error
    return secret


def fetch_model(argv: Sequence[str]) -> int:
    """Fetch a model once into a folder that the processes of a run share."""
    parser = Parser(
        prog="penstock fetch-model",
        description="Fetch a model once into a folder. Safe to kill, to repeat, and to start twice.",
        epilog="A private or gated model of the Hub needs HF_TOKEN. s3:// takes AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL, or the identity of a pod.",
    )
    parser.add_argument("source", help="Hub id such as Qwen/Qwen2.5-0.5B@main, s3://bucket/prefix, or a folder")
    parser.add_argument("target", type=Path, help="folder that then holds the model")
    parser.add_argument("--verify", action="store_true", help="read a folder that is complete already, and compare it")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="S", help="longest wait for another fetch or a store (3600)"
    )
    args = parser.parse_args(argv)
    from penstock.fetching import fetch_model as fetch

    print(fetch(args.source, args.target.absolute(), args.timeout, verify=args.verify))
    return 0
