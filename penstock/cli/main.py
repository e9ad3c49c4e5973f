"""The `penstock` command. It imports only the chosen subcommand, so that `--help` is fast.

Errors are one line on stderr, or one per wrong field. Exit codes: 0 success, 1 failure, 2 wrong usage, configuration or
input, 130 interrupted.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence

from penstock import __version__
from penstock.errors import ConfigError, InvalidInput, PenstockError

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("penstock_tools.local.commands:demo", "train a tiny model on this machine, start to finish"),
    "init": ("penstock_tools.starter", "write the configuration of a new run"),
    "import-verl": ("penstock_tools.verl_import.command", "write our configuration from a verl script or command line"),
    "up": ("penstock_tools.local.commands:up", "start every process of a run on this machine"),
    "join": ("penstock_tools.local.commands:join", "make this machine part of a run that is up on another one"),
    "submit": ("penstock.cli.commands.submit", "submit the prompts of a dataset file to a run"),
    "feed": ("penstock.cli.commands.feed", "submit the dataset of a config file to its run, and run its validations"),
    "status": ("penstock.cli.commands.observe:status", "show the state of a run once: step, version, queue, servers"),
    "top": ("penstock.cli.commands.observe:top", "watch a run live in the terminal"),
    "doctor": ("penstock_tools.doctor.command", "check a deployment and give advice"),
    "watch": ("penstock.cli.commands.observe:watch", "print the results of a run as they arrive"),
    "samples": ("penstock_tools.samples_command", "show what the model wrote in training: prompts, responses, rewards"),
    "plot": ("penstock_tools.plot", "draw the metrics of runs, also of runs that have ended"),
    "policies": ("penstock.cli.commands.control:policies", "list, compare, promote and rewind policy versions"),
    "runs": ("penstock.cli.commands.control:runs", "show, list, pause, resume and stop runs; show metrics by step"),
    "servers": ("penstock.cli.commands.control:servers", "list, drain and undrain the rollout servers of a run"),
    "keys": ("penstock.cli.commands.prepare:keys", "make and list the API keys of a gateway"),
    "queue": ("penstock_tools.recordings.queue_command", "inspect, record, replay and repair the queue of a run"),
    "plan": ("penstock_tools.sizing.plan_command", "estimate GPUs, memory, throughput and staleness of a run"),
    "simulate": ("penstock_tools.sizing.simulate_command", "predict step time, idle time and staleness of a run"),
    "fetch-model": (
        "penstock.cli.commands.prepare:fetch_model",
        "fetch a model once into a folder: from the Hub, S3, a folder or a GGUF file",
    ),
    "evaluate": ("penstock_tools.offline.commands:evaluate", "score a Parquet file of responses"),
    "generate": ("penstock_tools.offline.commands:generate", "sample answers to the prompts of a dataset file"),
    "search-index": ("penstock_tools.search_index", "index passages for the built-in search tool"),
    "gateway": ("penstock_services.gateway.__main__", "run one gateway process"),
    "rollout": ("penstock_rollout.__main__", "run one rollout server process"),
    "learner": ("penstock_learner.__main__", "run the learner process"),
    "sft": ("penstock_tools.sft.command", "fine-tune a model on supervised examples"),
    "check-model": ("penstock_tools.check_model", "check that the learner trains a model correctly, and how"),
    "export": ("penstock_tools.export", "write a checkpoint as a Hugging Face folder"),
}
"""Each command's function, which takes `argv` and returns an exit code, and its help. A module stands for its `main`.
They are given as text, because this package may not import the packages above it."""

_EXTRAS = {
    "penstock_services": "services",
    "penstock_rollout": "rollout",
    "penstock_learner": "learner",
    "penstock_tools": "tools",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. A closed pipe (`penstock status | head -1`) ends it quietly."""
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"penstock {__version__}")
        return 0
    name, *rest = words
    if name in COMMANDS:
        return _run(name, rest)
    from penstock.cli.parser import did_you_mean

    kind = "option" if name.startswith("-") else "command"
    known = ("--help", "--version") if kind == "option" else COMMANDS
    hint = did_you_mean(name, known, cutoff=0.5) or f"commands: {', '.join(COMMANDS)}"
    return _fail(f"unknown {kind} {name!r}; {hint}", 2)


def _run(name: str, argv: list[str]) -> int:
    module_path, _, function = COMMANDS[name][0].partition(":")
    try:
        command: Callable[[list[str]], int] = getattr(importlib.import_module(module_path), function or "main")
        return command(argv)
    except PenstockError as error:
        return _fail(str(error), 2 if isinstance(error, ConfigError | InvalidInput) else 1)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(module_path.partition(".")[0])
        if extra is None:
            raise
        return _fail(f"`penstock {name}` needs the extra [{extra}] ({error}): pip install 'penstock[all]'", 1)
    except KeyboardInterrupt as interrupt:
        print(f"penstock {name}: interrupted {interrupt}".rstrip(), file=sys.stderr)
        return 130
    except SystemExit as exit:  # --help, and mistakes on the command line
        if isinstance(exit.code, str):
            raise
        return exit.code or 0


def _help() -> str:
    packages = {package for package in _EXTRAS if importlib.util.find_spec(package)} | {"penstock"}
    width = max(map(len, COMMANDS))
    here = {name: text for name, (module, text) in COMMANDS.items() if module.partition(".")[0] in packages}
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, text in here.items())
    return (
        "usage: penstock COMMAND ...\n\nAsynchronous reinforcement-learning post-training of language models.\n\n"
        f"commands:\n{lines}\n\n"
        "`penstock COMMAND --help` describes a command. `penstock --version` prints the version.\n"
        "To start: `penstock demo`."
    )


def _fail(message: str, code: int) -> int:
    for line in message.splitlines():
        print(f"penstock: error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
