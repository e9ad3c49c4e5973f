"""`penstock import-verl`: write our configuration from a verl script, YAML file or command line."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from penstock.cli.parser import Parser, whole_number
from penstock.config.dataset import listed_files
from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, InvalidInput
from penstock.hub import is_hub_id
from penstock.start_checks import RUN_CHECKS
from penstock_tools.verl_import.hydra import HydraConfig, read_file, read_overrides
from penstock_tools.verl_import.keys import TEXT_ONLY, VERDICTS, Findings, Values, files, listed, local_path, look_up
from penstock_tools.verl_import.run import look_at_model, number, set_lora, set_run, set_warmup, steps_of_files
from penstock_tools.verl_import.shell import VerlCommand, find_command, read_script


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    out: Path | None = args.out
    if out is not None and out.exists() and not args.force:
        raise ConfigError(f"{out} exists; choose another name, or overwrite it with --force")
    imported = import_words(args.words, args.max_staleness)
    source = args.words[0] if Path(args.words[0]).is_file() else "a verl command line"
    text = config_text(imported, source, str(out or "FILE"))
    report = "\n".join(report_lines(imported, shows_unneeded=not args.brief))
    if out is None:
        print(text)
        print(report, file=sys.stderr)
        return 0
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
    print(report)
    print(f"\nwrote {out}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="penstock import-verl",
        description="Write our configuration from a verl run, and list every key that changed its meaning or has no "
        "counterpart. Scripts are read, never run.",
        epilog="Examples: penstock import-verl -o run.yaml run_qwen3.sh trainer.n_gpus_per_node=4; "
        "penstock import-verl python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo …",
    )
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="YAML file to write (default: standard output)")
    parser.add_argument(
        "--max-staleness", type=whole_number(0), default=0, metavar="N",
        help="versions that a sample may lag behind; 0 trains on-policy, as verl does (default: 0)",
    )  # fmt: skip
    parser.add_argument("--brief", action="store_true", help="omit the keys that are not needed here")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="CONFIG_OR_OVERRIDES",
        help="a shell script or YAML file and more overrides, or a verl command line, or key=value words",
    )  # fmt: skip
    return parser


def report_lines(imported: Imported, *, shows_unneeded: bool = True) -> list[str]:
    """What is dangerous, which keys have no counterpart or changed their meaning, and why."""
    findings = imported.findings
    lines = []
    for verdict, title in VERDICTS.items():
        if findings.keys[verdict] and (verdict != "unneeded" or shows_unneeded):
            lines.append(title)
            for name, value, reason in findings.keys[verdict]:
                text = " ".join(str(value).split())
                lines += [f"  {name}={text if len(text) <= 80 else f'{text[:77]}...'}", f"      {reason}"]
            lines.append("")
    if findings.notes:
        lines += ["Notes", *(f"  {note}" for note in findings.notes), ""]
    counts = ", ".join(f"{len(entries)} {verdict}" for verdict, entries in findings.keys.items())
    return [*lines, f"keys: {counts}, {findings.num_same} the same"]


def config_text(imported: Imported, source: str, file: str) -> str:
    """The YAML file: how to use it, the fields, and as comments what the import lost or changed."""
    if imported.command:
        words = [file if word == CONFIG else word for word in imported.command]
        head = [f"# Imported from {source}. Use it with: {shlex.join(words)}"]
    else:
        head = [
            f"# Imported from {source}. Check it with `penstock up {file} --check`.",
            f"# `penstock plan --config {file} --gpu NAME` says whether it fits. docs/coming-from-verl.md explains.",
        ]
    report = "\n".join(report_lines(imported, shows_unneeded=False))  # a note may quote several lines of a script
    tail = [f"# {line}".rstrip() for line in report.splitlines()]
    return "\n".join([*head, "", imported.yaml(), *tail, ""])


# ── from the words that a user gives to our config ──

_SFT = ("sft", "fsdp_sft")


@dataclass
class Imported:
    program: str
    """`ppo`, `dapo`, `generation`, `generation_server`, `eval`, `sft` or `fsdp_sft`."""
    findings: Findings
    config: RunConfig
    command: list[str] = field(default_factory=list)
    """For generation, evaluation and supervised training: the words of our command."""

    def yaml(self) -> str:
        """The fields in the order of docs/config.md."""
        fields = self.config.model_dump(mode="json", exclude_unset=True)
        if self.program in _SFT:
            del fields["learner"]["num_steps"]
        return yaml.safe_dump(fields, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def import_words(words: Sequence[str], max_staleness: int = 0) -> Imported:
    """`words` are a file (script or YAML) and overrides, or a command line, or only overrides.

    Raises ConfigError if there is no verl run in them, if it reads images, or if the result is not a valid config."""
    program, hydra = _read(list(words))
    values = Values(hydra, program)
    command: list[str] = []
    try:
        if program.startswith("generation"):
            command = set_generation(values)
        elif program == "eval":
            command = set_evaluation(values)
        elif program in _SFT:
            command = set_sft(values)
        else:
            set_run(values, max_staleness)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a value cannot be translated: {error}; check the numbers of the verl config") from error
    values.classify()
    dangers = values.findings.keys["danger"]
    if others := [f"{name}={value}" for name, value, reason in dangers if reason.startswith(TEXT_ONLY)]:
        raise ConfigError(
            f"{', '.join(others)}: {TEXT_ONLY}, no images, videos or sound. If the rows are text, add "
            "data.image_key=null, or the key of another model of text, after the script"
        )
    if program in _SFT:  # the number of its steps follows from its files
        values.set("learner.num_steps", 10**9)
    config = validate(values.fields, "the imported config")
    if not command:
        values.findings.notes += findings_of(config)
    return Imported(program, values.findings, config, command)


def _read(words: list[str]) -> tuple[str, HydraConfig]:
    if not words:
        raise ConfigError("give a script, a YAML file, or the words of a verl command")
    path = Path(words[0])
    if path.suffix in (".yaml", ".yml") and "=" not in words[0]:
        return _from_yaml(path, words[1:])
    if "=" not in words[0] and path.is_file():
        return _from_script(path, words[1:])
    command = find_command(words)
    if command is None and all("=" in word or word.startswith("-") for word in words):
        command = VerlCommand("ppo", words)
    if command is None:
        raise ConfigError(
            f"{words[0]} is neither a file nor a verl command; give a script, a YAML file, or "
            "`python3 -m verl.trainer.main_ppo key=value …`"
        )
    return command.program, read_overrides(command.words, [Path.cwd()])


def _from_yaml(path: Path, overrides: Sequence[str]) -> tuple[str, HydraConfig]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    config = read_file(path, [path.parent, *path.absolute().parents])
    added = read_overrides(overrides, []).values
    config.values = {name: value for name, value in config.values.items() if name not in added} | added
    return _program_of(config), config


def _program_of(config: HydraConfig) -> str:
    """A YAML file does not name its program: it is known by its keys."""
    sections = {name.partition(".")[0] for name in config.values}
    if "optim" in sections and "actor_rollout_ref" not in sections:
        return "fsdp_sft" if "model.partial_pretrain" in config.values else "sft"
    if "data.output_path" in config.values or {"model", "rollout"} <= sections:
        return "generation"
    if "data.response_key" in config.values:
        return "eval"
    if not sections & {"actor_rollout_ref", "algorithm", "data", "trainer"}:
        raise ConfigError("this YAML file has none of verl's sections: actor_rollout_ref, algorithm, data, trainer")
    return "dapo" if config.config_name.startswith("dapo") else "ppo"


def _from_script(path: Path, words: Sequence[str]) -> tuple[str, HydraConfig]:
    """`key=value` words are added to the script's command; others are its arguments, `$1` and so on."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a script: {error}") from error
    overrides = [word for word in words if "=" in word]
    read = read_script(text, str(path), [word for word in words if "=" not in word], os.environ)
    if not read.commands:
        raise ConfigError(
            f"{path} starts no verl run: it has no command with main_ppo, main_dapo, main_generation, main_eval or "
            "sft_trainer"
        )
    command = read.commands[0]
    folders = [Path.cwd(), *path.absolute().parents]
    config = read_overrides([*command.words, *overrides], folders)
    if read.unknown:
        config.notes.append(f"not known here, and taken as empty: {', '.join(read.unknown)}")
    config.notes += read.skipped
    if len(read.commands) > 1:
        config.notes.append(f"the script starts verl {len(read.commands)} times; the first command was imported")
    is_dapo = config.config_name.startswith("dapo")
    return "dapo" if is_dapo and command.program == "ppo" else command.program, config


# ── checks of the result, as far as its files are on this machine ──


_READ_BY: dict[str, tuple[str, ...]] = {
    "lengths": (), "model": ("model.path",), "rows": ("dataset.file", "dataset.validation.file"),
    "rewards": ("rollout.reward.function_file",),
    "agents": ("rollout.agents.tools_file", "rollout.agents.interactions_file"),
}  # fmt: skip
"""Fields with the files that each check reads."""


def findings_of(config: RunConfig) -> list[str]:
    """What `penstock up --check` would say about files and lengths: one line each. Nothing is looked up on the Hub."""
    fields, absent, wrong = config.model_dump(), [], []
    for name, keys in _READ_BY.items():
        given = [(key, entry.file) for key in keys for entry in listed_files(look_up(fields, key))]
        # verl's data are files: only a model may be an id on the Hub. What a pattern matches is checked at the start.
        absent += [
            f"{key}: {path} is not on this machine"
            for key, path in given
            if not (path.exists() or "*" in path.name or (name == "model" and is_hub_id(path)))
        ]
        try:
            if name in RUN_CHECKS and all(path.exists() for _, path in given):
                RUN_CHECKS[name](config)
        except (ConfigError, InvalidInput) as error:
            wrong.append(str(error))
    return absent + wrong


# ── verl's generation, evaluation and supervised training: a config and the command that uses it ──


CONFIG = "CONFIG"
"""The word of a command that stands for the file with the config."""


def set_generation(values: Values) -> list[str]:
    """Set the model and the engine. Returns the words of `penstock generate` without the config."""
    values.set_direct()
    look_at_model(values, "model.path")
    num_gpus = number(values.get("trainer.n_gpus_per_node"), 8) if values.is_given("trainer.n_gpus_per_node") else 1
    num_servers, num_idle = divmod(num_gpus, int(values.get("rollout.tensor_model_parallel_size")))
    if num_idle:
        values.lose("trainer.n_gpus_per_node", f"{num_idle} of {num_gpus} are left over by engines of equal size")
    values.set("run", "verl-generation")
    prompt, response = int(values.get("rollout.prompt_length")), int(values.get("rollout.response_length"))
    values.set("rollout.engine.max_model_len", int(values.get("rollout.max_model_len") or prompt + response))
    values.set("rollout.reward.compat", "verl")
    words = [
        "penstock", "generate", str(files(values.get("data.path"))), "--config", CONFIG,
        "--output", local_path(values.get("data.output_path")),
        "--n", str(values.get("data.n_samples")), "--temperature", str(values.get("rollout.temperature")),
        "--top-p", str(values.get("rollout.top_p")), "--top-k", str(max(0, int(values.get("rollout.top_k")))),
        "--max-tokens", str(response),
    ]  # fmt: skip
    words += ["--servers", str(num_servers)] * (num_servers > 1)
    return [*words, *["--ignore-eos"] * bool(values.get("rollout.ignore_eos"))]


def set_evaluation(values: Values) -> list[str]:
    """Set the rewards. Returns the words of `penstock evaluate` without the config."""
    values.set_direct(*["custom_reward_function."] * (not values.is_given("custom_reward_function.path")))
    values.set("run", "verl-evaluation")
    values.set("model.path", "not-used")
    values.set("rollout.reward.compat", "verl")
    file = str(files(values.get("data.path")))
    return ["penstock", "evaluate", file, "--config", CONFIG, "--response-column", str(values.get("data.response_key"))]


def set_sft(values: Values) -> list[str]:
    """Set the model, the files and the learner. Returns the words of `penstock sft` without the config."""
    is_plain = values.program == "fsdp_sft" and not values.get("data.multiturn.enable")
    used = {
        "data.multiturn.": not is_plain,
        "trainer.test_freq": values.is_given("data.val_files"),
        "trainer.project_name": "wandb" in listed(values.get("trainer.logger")),
    }
    values.set_direct(*(prefix for prefix, is_used in used.items() if not is_used))
    look_at_model(values, "model.path")
    values.set("model.dtype", "bfloat16")
    values.set("sft.last_batch", "drop")
    if is_plain:  # a question as the user's message, and an answer
        for column in ("prompt", "response"):
            keys = values.get(f"data.{column}_dict_keys") or []
            if len(keys) > 1:
                values.lose(f"data.{column}_dict_keys", "a field of a column may not be nested deeper")
            values.set(f"sft.columns.{column}", ".".join(map(str, [values.get(f"data.{column}_key"), *keys[:1]])))
        values.set("sft.text_prompts", "user")
    set_warmup(values, "optim.", steps_of_files(values), int(values.get("optim.lr_warmup_steps")) < 0)
    longest, rows = int(values.get("data.max_length")), int(values.get("data.micro_batch_size_per_gpu"))
    tokens = int(values.get("data.max_token_len_per_gpu")) if values.get("data.use_dynamic_bsz") else rows * longest
    values.set("learner.micro_batch_tokens", tokens)
    set_lora(values, "model.")
    num_sharing = int(values.get("engine.ulysses_sequence_parallel_size") or 1)
    num_ranks = max(number(values.get("trainer.n_gpus_per_node"), 8), num_sharing)
    num_ranks -= num_ranks % num_sharing
    values.set("learner.sequence_parallel", num_sharing)
    values.set("learner.policy.num_ranks", num_ranks)
    values.findings.notes.append("the command takes the ranks from the config; torchrun's own number may be another")
    out = local_path(values.get("trainer.default_local_dir") or "models/sft")
    torchrun = ["torchrun", "--nproc-per-node", str(num_ranks), "-m", "penstock.cli.main"]
    return [*torchrun, "sft", "--config", CONFIG, "--out", out]
