"""`penstock init`: write the configuration of a new run, a short YAML file with comments, ready for `up`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from penstock.cli.parser import Parser, did_you_mean, interruptible, whole_number
from penstock.config.loading import read_config
from penstock.errors import ConfigError
from penstock.machine import visible_gpus
from penstock.weights.folder_tensors import language_fields, read_json

SHARED_UTILIZATION = 0.4
"""Share of the only GPU's memory that the engine takes. The learner has the rest."""
_WEIGHTS = {"policy": 4, "critic": 4, "reference": 1, "reward_model": 1}
"""How a GPU is divided among roles. Trained models also keep gradients and optimizer state there."""


@dataclass(frozen=True)
class RoleGpus:
    num_ranks: int
    gpus_per_rank: float


@dataclass(frozen=True)
class DividedGpus:
    num_servers: int
    roles: dict[str, RoleGpus]
    gpu_memory_utilization: float | None = None
    """Set if the server and the learner share one GPU."""
    tensor_parallel: int = 1
    sequence_parallel: int = 1


def divide_gpus(num_gpus: int, placement: str, roles: tuple[str, ...]) -> DividedGpus:
    """Divide the GPUs of one machine among the rollout servers and the roles, which start with the policy. Raises
    ConfigError if the placement needs more GPUs.

    gpus   servers            learner
    0      1, on the CPU      every role on the CPU
    1      1, shares the GPU  every role has a part of the GPU
    n      n / 2              the rest, by placement"""
    if num_gpus == 0:
        return DividedGpus(1, {role: RoleGpus(1, 0) for role in roles})
    if num_gpus == 1 or placement != "standalone":
        return collocate(num_gpus, roles)
    num_servers = max(1, min(num_gpus // 2, num_gpus - len(roles)))
    num_left = num_gpus - num_servers
    if num_left < len(roles):
        raise ConfigError(
            f"placement standalone needs {len(roles) + 1} GPUs, one for each of {', '.join(roles)} and one for a "
            f"rollout server; there are {num_gpus}: use split-collocate"
        )
    # One GPU for the reference; policy and critic share the others evenly.
    num_ranks = dict.fromkeys(roles, 1)
    trained = [role for role in roles if role != "reference"]
    for index in range(num_left - len(roles)):
        num_ranks[trained[index % len(trained)]] += 1
    return DividedGpus(num_servers, {role: RoleGpus(count, 1) for role, count in num_ranks.items()})


def collocate(
    num_gpus: int, roles: tuple[str, ...], tensor_parallel: int = 1, sequence_parallel: int = 1, num_rollout: int = 0
) -> DividedGpus:
    """Half of the GPUs, or `num_rollout` of them, for engines. Policy and reference share GPUs, and so do critic and
    reward model. A tensor or sequence parallelism that leaves no GPU for the other side is made smaller."""
    if num_gpus <= 1:
        return DividedGpus(1, shares_of_gpus(roles, 1), SHARED_UTILIZATION)
    for_engines = num_rollout or num_gpus // 2
    while tensor_parallel > for_engines:
        tensor_parallel = max(1, tensor_parallel // 2)
    num_servers = for_engines // tensor_parallel
    left = num_gpus - num_servers * tensor_parallel
    apart = tuple(role for role in roles if role in ("critic", "reward_model") and left != 1)
    num_apart = left // 2 if apart else 0
    num_policy = left - num_apart
    while sequence_parallel > max(1, num_policy):
        sequence_parallel //= 2
    num_policy -= num_policy % sequence_parallel
    with_policy = tuple(role for role in roles if role not in apart)
    divided = shares_of_gpus(with_policy, num_policy) | shares_of_gpus(apart, num_apart)
    return DividedGpus(num_servers, divided, None, tensor_parallel, sequence_parallel)


def shares_of_gpus(roles: tuple[str, ...], num_ranks: int) -> dict[str, RoleGpus]:
    """Each role has `num_ranks` ranks, and a part of each of their GPUs."""
    whole = sum(_WEIGHTS[role] for role in roles)
    return {role: RoleGpus(num_ranks, int(100 * _WEIGHTS[role] / whole) / 100) for role in roles}


BUILT_IN_REWARDS = ("gsm8k", "math", "code", "exact_match")
Placement = Literal["standalone", "split-collocate"]
_CONTEXT = 32768
"""Context of a model that does not say its own."""
_PROMPT_TOKENS = 1024
_PRESETS = next(
    (folder for folder in (Path(__file__).parent / "presets", Path(__file__).parents[2] / "examples" / "presets")
     if folder.is_dir()), Path("presets"),
)  # fmt: skip
"""The presets: in the wheel, or in a clone of the repository."""


@dataclass(frozen=True)
class Algorithm:
    preset: dict[str, Any]

    @property
    def roles(self) -> tuple[str, ...]:
        learner = self.preset["learner"]
        has_reference = learner["algorithm"]["kl"]["placement"] != "none"
        return ("policy", *["reference"] * has_reference, *["critic"] * ("critic" in learner))

    def fields(self, section: str, *names: str) -> dict[str, Any]:
        return {name: self.preset[section][name] for name in names if name in self.preset[section]}


ALGORITHMS = {path.stem: Algorithm(read_config(path)) for path in sorted(_PRESETS.glob("*.yaml"))}


@dataclass(frozen=True)
class Answers:
    """The options of `penstock init`."""

    run: str
    model: str
    data: str = ""
    """Empty if clients submit the prompts."""
    validation: str = ""
    reward: str = ""
    """A Python file, or one of BUILT_IN_REWARDS. If empty, each prompt's data source decides."""
    algorithm: str = "grpo"
    gpus: int = 0
    placement: Placement | None = None
    """None means split-collocate if several models share GPUs."""
    max_tokens: int | None = None
    groups_per_step: int | None = None
    num_samples: int | None = None
    lr: float | None = None
    steps: int = 100

    @property
    def numbers(self) -> dict[str, Any]:
        """The last five fields. None means the value of the algorithm's preset, for `max_tokens` a quarter of the
        model's context and at most 1024, and less without a GPU: steps of a preset's size would take minutes there."""
        algorithm, cpu = ALGORITHMS[self.algorithm], self.gpus == 0
        groups = algorithm.preset["replay"]["groups_per_step"]
        samples = algorithm.preset["dataset"]["num_samples"]
        defaults = {
            "max_tokens": max(1, min(256 if cpu else 1024, context_of(self.model) // 4)),
            "groups_per_step": 16 if cpu else groups,
            "num_samples": min(8, samples) if cpu else samples,
            "lr": float(algorithm.preset["learner"]["lr"]),
            "steps": self.steps,
        }
        return {name: value if getattr(self, name) is None else getattr(self, name) for name, value in defaults.items()}

    @property
    def interval(self) -> int:
        """Steps between two checkpoints and between two validations: at least one comes before the last step."""
        return max(1, min(25, self.steps // 2))

    @property
    def chosen_placement(self) -> str:
        shares_gpus = self.gpus > 0 and len(ALGORITHMS[self.algorithm].roles) > 1
        return self.placement or ("split-collocate" if shares_gpus else "standalone")


def context_of(model: str) -> int:
    """The longest sequence of a model folder, in tokens. A folder that does not say it, or is not here, has 32768."""
    try:
        found = language_fields(read_json(Path(model) / "config.json")).get("max_position_embeddings")
    except (OSError, ValueError):
        return _CONTEXT
    return found if isinstance(found, int) and found > 8 else _CONTEXT


# ── the text of the file ──


_HEAD = """\
# Check this file with `penstock up {file} --check`, and start the run with `penstock up {file}`.
# docs/config.md lists all fields. Paths are relative to the folder in which you start the run."""
_SECTIONS = ("model", "dataset", "replay", "rollout", "engine", "learner", "algorithm")
"""Fields with a line for each of their own fields."""
_COMMENTS = {
    "epochs": "passes over the data; 0: until the last step",
    "num_samples": "responses to each prompt",
    "max_tokens": "longest response",
    "groups_per_step": "prompts of a training step",
    "max_staleness": "versions that a sample may lag behind; 0 is on-policy",
    "dynamic_sampling": "drops groups whose rewards are all equal",
    "num_servers": "each uses engine.tensor_parallel_size GPUs",
    "name": "vLLM if it is installed, else torch",
    "max_model_len": "longest prompt and response together",
    "gpu_memory_utilization": "the learner needs the rest of this GPU",
    "critic_warmup_steps": "steps in which only the critic learns",
}
_ABSENT = {
    "dataset": "{file: train.parquet}   # without it, clients submit prompts: penstock submit FILE",
    "validation": "{file: heldout.parquet}",
    "reward": "{function_file: reward.py}   # without it: by the data source of each prompt",
}
"""How the file shows a field that is not set."""


def starter_config(answers: Answers, file: str) -> str:
    """The text of the YAML file. Raises ConfigError if the GPUs do not suffice for the placement, or if a built-in
    reward is misspelled."""
    comments = {**_COMMENTS, "algorithm": answers.algorithm}
    if answers.reward not in BUILT_IN_REWARDS:
        if (hint := did_you_mean(answers.reward, BUILT_IN_REWARDS)) and not Path(answers.reward).exists():
            raise ConfigError(f"--reward {answers.reward} is neither a file nor a built-in reward; {hint}")
        comments["reward"] = "it defines compute_score"
    return "\n".join([_HEAD.format(file=file), *_lines(starter_fields(answers), comments)]) + "\n"


def starter_fields(answers: Answers) -> dict[str, Any]:
    """The configuration, in the order of the file. None stands for a field that the file shows as a comment."""
    algorithm, numbers = ALGORITHMS[answers.algorithm], answers.numbers
    longest, groups, lr = numbers["max_tokens"], numbers["groups_per_step"], numbers["lr"]
    divided = divide_gpus(answers.gpus, answers.chosen_placement, algorithm.roles)
    engine = {"name": "auto", "max_model_len": min(context_of(answers.model), longest + _PROMPT_TOKENS)}
    if answers.gpus == 0:
        engine |= {"kv_cache_bytes": 268435456, "enforce_eager": True}
    if divided.gpu_memory_utilization is not None:
        engine["gpu_memory_utilization"] = divided.gpu_memory_utilization
    reward: dict[str, Any] = {"function_file": answers.reward}
    if answers.reward in BUILT_IN_REWARDS:
        reward = {"by_data_source": {"*": {"kind": answers.reward}}}
    dataset = {
        "file": answers.data, "epochs": 0, "num_samples": numbers["num_samples"], "max_tokens": longest,
        "validation": {"file": answers.validation, "every_steps": answers.interval, "max_tokens": longest}
        if answers.validation else None,
    }  # fmt: skip
    roles: dict[str, dict[str, Any]] = {name: asdict(role) for name, role in divided.roles.items()}
    if "critic" in roles:
        roles["critic"]["lr"] = float(f"{10 * lr:g}")
    names = ("minibatches_per_step", "weight_decay", "warmup_steps", "critic_warmup_steps")
    limits = {"minibatches_per_step": groups, "warmup_steps": answers.interval, "critic_warmup_steps": answers.interval}
    set_by_preset = {
        name: min(value, limits.get(name, value)) for name, value in algorithm.fields("learner", *names).items()
    }
    # The preset may be for responses of another length.
    lengths = {"constant_length": longest, "max_num_tokens": longest, "buffer_num_tokens": max(1, longest // 5)}
    return {
        "run": answers.run,
        "model": {"path": answers.model, "dtype": "bfloat16" if answers.gpus else "float32"},
        "dataset": dataset if answers.data else None,
        "replay": {"groups_per_step": groups, "max_staleness": 2, **algorithm.fields("replay", "dynamic_sampling")},
        "rollout": {
            "num_servers": divided.num_servers, "engine": engine, "reward": reward if answers.reward else None,
        },
        "learner": {
            "num_steps": answers.steps, "lr": lr, "placement": answers.chosen_placement, **roles,
            **set_by_preset,
            "algorithm": {
                name: {field: lengths.get(field, value) for field, value in section.items()}
                for name, section in algorithm.preset["learner"]["algorithm"].items()
            },
            "checkpoint": {"every_steps": answers.interval},
        },
    }  # fmt: skip


def _lines(fields: dict[str, Any], comments: dict[str, str], indent: str = "") -> Iterator[str]:
    for name, value in fields.items():
        if name in _SECTIONS and not indent:
            yield ""
        if value is None:
            yield f"{indent}# {name}: {_ABSENT[name]}"
            continue
        line = f"{indent}{name}:" if name in _SECTIONS else f"{indent}{name}: {_flow(value)}"
        yield f"{line:<28} # {comments[name]}" if name in comments else line
        if name in _SECTIONS:
            yield from _lines(value, comments, f"{indent}  ")


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("...\n").strip()


# ── the command ──


def main(argv: Sequence[str]) -> int:
    """Write the configuration of a new run. Without options it asks, on a terminal."""
    args = _init_parser().parse_args(argv)
    file: Path = args.file
    if file.exists() and not args.force:
        raise ConfigError(f"{file} exists; choose another name, or overwrite it with --force")
    given = {name: value for name, value in vars(args).items() if name not in ("file", "force") and value is not None}
    asks = not given and sys.stdin.isatty()
    if not asks and "model" not in given:
        raise ConfigError("--model is missing; give the folder or the Hub id of the model to train")
    with interruptible("before it wrote the file"):
        answers = _ask(file) if asks else Answers(**{"run": _run_name(file), "gpus": len(visible_gpus()), **given})
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
    for name, (text, options, default) in _QUESTIONS.items():
        shown = f" (default: {default})" if default else ""
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"{text}{shown}", **options)
    parser.add_argument("--run", metavar="NAME", help="name of the run (default: the name of the file)")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    return parser


def _ask(file: Path) -> Answers:
    """Ask for everything, with a default where there is one. A wrong answer is asked for again."""
    print("Enter accepts the value in brackets.")
    answers: dict[str, Any] = {"run": _run_name(file)}
    for name, (text, _, default) in _QUESTIONS.items():
        if name == "placement" and (answers["gpus"] < 2 or len(ALGORITHMS[answers["algorithm"]].roles) == 1):
            continue
        numbers = Answers(**answers).numbers if "gpus" in answers else {"gpus": len(visible_gpus())}
        offered = f"{numbers[name]:g}" if name in numbers else default
        answers[name] = _answer(name, text[0].upper() + text[1:], offered)
    return Answers(**answers)


def _answer(name: str, question: str, default: str) -> Any:
    while True:
        try:
            text = input(f"{question} [{default}]: " if default else f"{question}: ").strip() or default
        except EOFError as error:
            raise KeyboardInterrupt from error
        try:
            return _parsed(name, text)
        except (argparse.ArgumentTypeError, ValueError) as error:
            print(f"  {error}")


def _check(text: str, file: Path) -> None:
    """Make the checks of a start that need no other process and no lookup on the Hub, before the file is written."""
    from penstock.config.loading import parse_value, validate
    from penstock.start_checks import RUN_CHECKS, checks_of_hub_files

    config = validate(parse_value(text), str(file))
    skipped = {"tokenizer", "rows"} | checks_of_hub_files(config)
    for name, check in RUN_CHECKS.items():
        if name not in skipped:
            check(config)


def _run_name(file: Path) -> str:
    """The name of a run from its file's name: `My run.yaml` is `my-run`."""
    return re.sub(r"[^a-z0-9_-]+", "-", file.stem.lower()).strip("-_")[:63] or "run"


def _parsed(name: str, text: str) -> Any:
    """The value of an answer. For a path or Hub id, `none` and `auto` are empty, and built-in rewards pass."""
    options = _QUESTIONS[name][1]
    if text not in options.get("choices", (text,)):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(options['choices'])}")
    if name not in ("model", "data", "validation", "reward"):
        return options.get("type", str)(text)
    from penstock.hub import is_hub_id

    if text in ("none", "auto"):
        return ""
    if not text or not (text in BUILT_IN_REWARDS or Path(text).exists() or is_hub_id(Path(text))):
        raise argparse.ArgumentTypeError(f"{text or 'an empty name'} does not exist")
    return text


_COUNT, _NUMBER = {"type": whole_number(0), "metavar": "N"}, {"type": whole_number(1), "metavar": "N"}
_QUESTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "model": ("model to train: a folder, or an id of the Hugging Face Hub", {}, ""),
    "data": ("dataset to train on; without one, clients submit prompts", {}, "none"),
    "validation": ("held-out dataset, scored at least twice during training", {"metavar": "DATA"}, "none"),
    "reward": ("reward: a Python file, gsm8k, math, code, exact_match, or auto (by data source)", {}, "auto"),
    "algorithm": (f"algorithm: {', '.join(ALGORITHMS)}", {"choices": tuple(ALGORITHMS), "metavar": "NAME"}, "grpo"),
    "gpus": ("GPUs to use", _COUNT, "all of this machine"),
    "placement": (
        "placement: split-collocate (policy and reference share GPUs), or standalone",
        {"choices": get_args(Placement)}, "split-collocate",
    ),
    "max_tokens": ("longest response, in tokens", _NUMBER, "at most 1024, without a GPU 256"),
    "groups_per_step": ("prompts of a training step", _NUMBER, "that of the preset, without a GPU 16"),
    "num_samples": ("responses to each prompt", _NUMBER, "that of the preset, without a GPU at most 8"),
    "steps": ("training steps", _NUMBER, "100"),
    "lr": ("learning rate", {"type": float}, "that of the preset"),
}  # fmt: skip
"""The help and question, the option, and the default."""
