"""`penstock submit FILE`: the prompts of a dataset file, in batches.

The whole file is read and checked before the first batch is sent. The key of a batch is derived from its prompts, its
position and --epoch, so running the same command again submits only what had not arrived.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.connection import add_gateway_arguments, open_client
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from rich.progress import Progress

    from penstock.client import SyncPenstockClient
    from penstock.trajectory import Prompt

BATCH_PROMPTS = 256
DEADLINE_S = 120.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock submit", description="Submit the prompts of a dataset file to a run."
    )
    parser.add_argument("file", type=Path, help="verl Parquet, JSONL with the same fields, or a Hugging Face folder")
    add_gateway_arguments(parser)
    parser.add_argument("--num-samples", type=int, default=8, help="samples of each prompt (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (default: %(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="stay until every prompt is finished")
    parser.add_argument("--epoch", type=int, default=0, help="another number submits the same prompts once more")
    args = parser.parse_args(argv)

    prompts = _read(args)
    with open_client(args, DEADLINE_S) as client:
        num_replayed, first, last = submit_all(client, prompts, args.epoch)
        print(f"submitted {len(prompts)} prompts, ids {first} to {last}; {num_replayed} had been submitted before")
        if args.wait is not None:
            wait_all(client, range(first, last + 1), args.wait)
    return 0


def wait_all(client: SyncPenstockClient, prompt_ids: Sequence[int], timeout_s: float) -> None:
    """A progress bar until every prompt is finished."""
    import time

    with progress_bar("waiting") as progress:
        task, deadline = progress.add_task("", total=len(prompt_ids)), time.monotonic() + timeout_s
        for prompt_id in prompt_ids:
            client.wait_for_prompt(prompt_id, max(0.0, deadline - time.monotonic()))
            progress.advance(task)


def progress_bar(text: str) -> Progress:
    """On a terminal's stderr; elsewhere nothing is shown."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def submit_all(client: SyncPenstockClient, prompts: Sequence[Prompt], epoch: int) -> tuple[int, int, int]:
    """Send every batch; returns how many prompts had been there already, and the smallest and largest id."""
    num_replayed = 0
    ids: list[int] = []
    with progress_bar("submitting") as progress:
        task = progress.add_task("", total=len(prompts))
        for start in range(0, len(prompts), BATCH_PROMPTS):
            batch = prompts[start : start + BATCH_PROMPTS]
            submission = client.submit(batch, batch_key(batch, start, epoch))
            num_replayed += len(batch) if submission.replayed else 0
            ids += (submission.prompt_ids[0], submission.prompt_ids[-1])
            progress.advance(task, len(batch))
    return num_replayed, min(ids), max(ids)


def batch_key(batch: Sequence[Prompt], start: int, epoch: int) -> str:
    """The same for the same prompts, sampling, position and epoch, on every machine."""
    from penstock.client.prompt_body import prompt_body

    content = json.dumps([start, epoch, [prompt_body(prompt) for prompt in batch]], sort_keys=True)
    return f"submit-{hashlib.sha256(content.encode()).hexdigest()}"


def _read(args: argparse.Namespace) -> list[Prompt]:
    from itertools import islice

    from penstock.feed.datasets import read_prompts
    from penstock.trajectory import Sampling

    if args.limit is not None and args.limit < 1:
        raise InvalidInput("--limit", "must be at least 1")
    sampling = Sampling(temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_tokens)
    rows = read_prompts(args.file, num_samples=args.num_samples, sampling=sampling)
    prompts = list(islice(rows, args.limit))
    if not prompts:
        raise InvalidInput(str(args.file), "holds no prompts")
    return prompts
