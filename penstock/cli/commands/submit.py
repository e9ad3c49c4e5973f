"""`penstock submit FILE`: submit the prompts of a dataset file in batches, after the whole file was checked.

The idempotency key of a prompt is derived from the prompt, its position and --epoch. So the same command, with another
--limit or a longer file, submits only what has not arrived yet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.connection import add_gateway_arguments, open_client
from penstock.cli.output import progress_bar
from penstock.cli.parser import Parser, interruptible, whole_number
from penstock.errors import InvalidInput
from penstock.sampling import add_sampling_flags, sampling_from_flags

if TYPE_CHECKING:
    from penstock.client import SyncPenstockClient
    from penstock.trajectory import Prompt

BATCH_PROMPTS = 256
DEADLINE_S = 120.0


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="penstock submit", description="Submit the prompts of a dataset file to a run.")
    parser.add_argument(
        "file", type=Path, help="Parquet or JSONL file with verl's columns, or a Hugging Face dataset folder"
    )
    add_gateway_arguments(parser)
    parser.add_argument("--num-samples", type=int, default=8, help="samples per prompt (default: %(default)s)")
    add_sampling_flags(parser)
    parser.add_argument("--limit", type=whole_number(1), metavar="N", help="submit only the first N prompts")
    parser.add_argument("--wait", type=float, metavar="S", help="wait S seconds at most until every prompt is finished")
    parser.add_argument("--epoch", type=int, default=0, help="give another number to submit the same prompts again")
    args = parser.parse_args(argv)

    prompts = _read(args)
    with open_client(args, DEADLINE_S) as client:
        with interruptible("while it submitted prompts; run it again: nothing is submitted twice"):
            num_replayed, ids = submit_all(client, prompts, args.epoch)
        print(submitted_line(len(prompts), num_replayed, min(ids), max(ids)))
        if args.wait is not None:
            with interruptible(f"while it waited for {len(ids)} prompts, which stay submitted"):
                wait_all(client, ids, args.wait)
    return 0


def submitted_line(num_prompts: int, num_replayed: int, first: int, last: int) -> str:
    """What a submission did. A prompt that was submitted before keeps its id and is not queued again."""
    if num_replayed == num_prompts:
        return (
            f"nothing is new: all {num_prompts} prompts were submitted before, as ids {first} to {last}; give another "
            "--epoch to submit them again"
        )
    before = f"; {num_replayed} others were submitted before" if num_replayed else ""
    return f"submitted {num_prompts - num_replayed} prompts, ids {first} to {last}{before}"


def wait_all(client: SyncPenstockClient, prompt_ids: Sequence[int], timeout_s: float) -> None:
    import time

    with progress_bar("waiting") as progress:
        task, deadline = progress.add_task("", total=len(prompt_ids)), time.monotonic() + timeout_s
        for prompt_id in prompt_ids:
            client.wait_for_prompt(prompt_id, max(0.0, deadline - time.monotonic()))
            progress.advance(task)


def submit_all(client: SyncPenstockClient, prompts: Sequence[Prompt], epoch: int) -> tuple[int, list[int]]:
    """Send every batch. Returns how many prompts were already submitted before, and the ids of all."""
    num_replayed = 0
    ids: list[int] = []
    with progress_bar("submitting") as progress:
        task = progress.add_task("", total=len(prompts))
        for start in range(0, len(prompts), BATCH_PROMPTS):
            batch = prompts[start : start + BATCH_PROMPTS]
            keys = [prompt_key(prompt, start + row, epoch) for row, prompt in enumerate(batch)]
            submission = client.submit(batch, prompt_keys=keys)
            num_replayed += submission.num_replayed
            ids += submission.prompt_ids
            progress.advance(task, len(batch))
    return num_replayed, ids


def prompt_key(prompt: Prompt, row: int, epoch: int) -> str:
    """Idempotency key of a prompt: equal for equal content, sampling, position and epoch, on every machine."""
    from penstock.client.client import prompt_body

    content = json.dumps([row, epoch, prompt_body(prompt)], sort_keys=True)
    return f"submit-{hashlib.sha256(content.encode()).hexdigest()[:32]}"


def _read(args: argparse.Namespace) -> list[Prompt]:
    from itertools import islice

    from penstock.feed.datasets import read_prompts

    rows = read_prompts(args.file, num_samples=args.num_samples, sampling=sampling_from_flags(args))
    prompts = list(islice(rows, args.limit))
    if not prompts:
        raise InvalidInput(str(args.file), "contains no prompts")
    return prompts
