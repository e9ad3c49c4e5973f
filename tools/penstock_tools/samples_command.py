"""`penstock samples`: show what the model wrote in training or in validations, from the files of a run's folder.

penstock samples                      the newest samples
penstock samples --worst              those with the lowest reward
penstock samples --step 40:50 --reward :0 --grep 'answer is'
                                      of steps 40 to 50, without reward, with this text
penstock samples --validation --step 50
                                      what the validation of step 50 got
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.connection import RUNS_FOLDER, folders_up
from penstock.cli.output import as_text, labelled, shown, versions_text
from penstock.cli.parser import Parser, RawHelpFormatter, whole_number
from penstock.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from penstock.samples import Sample, SampleFilter

MAX_LIMIT = 100_000
SHOWN_CHARACTERS = 600
_EPILOG = (__doc__ or "").partition("\n\n")[2]
_RANGES = {
    "step": "of these steps", "reward": "with these rewards", "length": "with this many response tokens",
    "version": "sampled by these policy versions, at least in part",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    from penstock.samples import has_samples, select

    folder = args.run_dir or _chosen_folder(args.kind)
    if not has_samples(folder / args.kind):
        done, setting = ("validated", "validation_samples") if args.kind else ("trained a step", "share")
        raise ConfigError(
            f"{folder / args.kind} has no samples.jsonl; give --run-dir with the folder of a run that has {done} and "
            f"whose learner.samples.{setting} is not 0"
        )
    found = select(folder / args.kind, _wanted(args), args.limit, args.order)
    if args.json:
        for sample in found:
            print(json.dumps(asdict(sample)))
    elif found:
        if not args.run_dir:
            print(f"samples of {folder / args.kind}")
        _print(found, None if args.full else SHOWN_CHARACTERS)
    else:
        print(f"no sample of {folder / args.kind} matches")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="penstock samples",
        description="Show prompts, responses and rewards of samples, the newest first. Ranges are written as "
        "A:B, A:, :B, or one number. A negative number needs an equals sign: --reward=-1:0.",
        epilog=_EPILOG,
        formatter_class=RawHelpFormatter,
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR",
        help=f"folder of a run on this machine (default: the one in {RUNS_FOLDER}/ that is up, or "
        "that has the newest samples if none is)",
    )  # fmt: skip
    parser.add_argument(
        "--validation", dest="kind", action="store_const", const="validation", default="",
        help="samples of validations, not of training",
    )  # fmt: skip
    order = parser.add_mutually_exclusive_group()
    for name in ("worst", "best"):
        text = f"the {'lowest' if name == 'worst' else 'highest'} rewards first"
        order.add_argument(f"--{name}", dest="order", action="store_const", const=name, default="newest", help=text)
    for name, text in _RANGES.items():
        parser.add_argument(f"--{name}", metavar="A:B", help=text)
    parser.add_argument("--source", default="", metavar="NAME", help="of this data source")
    parser.add_argument("--prompt-id", type=int, metavar="ID", help="of this prompt: all samples of its group")
    parser.add_argument("--grep", default="", metavar="REGEX", help="with this text in the prompt or the response")
    limit = whole_number(1, MAX_LIMIT)
    parser.add_argument("--limit", type=limit, default=10, metavar="N", help="show N samples (default: %(default)s)")
    parser.add_argument("--full", action="store_true", help=f"show whole texts, not {SHOWN_CHARACTERS} characters")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    return parser


def _chosen_folder(kind: str) -> Path:
    """The newest run that is up, even if it has no samples yet; otherwise the run with the newest samples."""
    if up := folders_up():
        return up[-1]
    runs = [
        (path.stat().st_mtime, run) for run in RUNS_FOLDER.glob("*") for path in (run / kind).glob("samples*.jsonl")
    ]
    if not runs:
        raise ConfigError(f"no run in {RUNS_FOLDER}/ has samples; give --run-dir with the folder of a run")
    return max(runs)[1]


def _wanted(args: argparse.Namespace) -> SampleFilter:
    from penstock.samples import Range, SampleFilter

    ranges: dict[str, Any] = {}
    for name in _RANGES:
        text = getattr(args, name)
        try:
            ranges[f"{name}s"] = Range() if text is None else Range.parse(text)
        except ValueError:
            raise InvalidInput(f"--{name}", f"{text!r} is not a range; write 3:7, 3:, :7 or 3") from None
    return SampleFilter(data_source=args.source, prompt_id=args.prompt_id, pattern=args.grep, **ranges)


# ── output ──


def _print(samples: Sequence[Sample], max_characters: int | None) -> None:
    from rich.console import Console

    console = Console()
    for sample in samples:
        console.print(_head(sample))
        console.print(labelled(_texts(sample), max_characters))


def _head(sample: Sample) -> Any:
    from rich.text import Text

    from penstock.config.dataset import DatasetConfig

    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    parts = "".join(f"  {name} {value:g}" for name, value in sample.reward_parts.items() if value is not None)
    facts = (
        sample.validation and "validation" + f" of {sample.validation}" * (sample.validation != DatasetConfig().name),
        f"step {sample.step}",
        f"prompt {sample.prompt_id}.{sample.sample}",
        versions_text(sample.min_version, sample.max_version), f"{sample.num_tokens} tokens",
        sample.finish_reason, "reward failed" if sample.reward_failed else "", "baseline" if sample.is_baseline else "",
        sample.server_id, sample.data_source,
    )  # fmt: skip
    return Text.assemble(
        (f"reward {reward}{shown(parts)}", "bold"), "  ", (shown("  ".join(filter(None, facts))), "dim")
    )


def _texts(sample: Sample) -> dict[str, str]:
    truth = "" if sample.ground_truth is None else as_text(sample.ground_truth)
    texts = {"prompt": sample.prompt, "truth": truth, "response": sample.response}
    return {name: text for name, text in texts.items() if text or name == "response"}
