"""The command line of a worker: which gateway, how many sessions at once, and which tasks to submit first."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from penstock.client.client import PenstockClient
from penstock.client.worker import Agent, work


def worker_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    gateway = parser.add_mutually_exclusive_group(required=True)
    gateway.add_argument("--run-dir", help="folder of a run on this machine")
    gateway.add_argument("--url", help="a gateway; its key is read from PENSTOCK_API_KEY")
    parser.add_argument("--submit", type=int, default=0, help="submit the tasks first, with this many sessions each")
    parser.add_argument("--at-once", type=int, default=8, help="sessions at a time (8)")
    parser.add_argument("--idle-s", type=float, default=float("inf"), help="end after this long without a task")
    return parser


async def run_worker(options: argparse.Namespace, agent: Agent, payloads: Sequence[Any]) -> None:
    """Let the agent work as the options of `worker_parser` say, and print what became of its sessions. `payloads` are
    the tasks that `--submit` submits."""
    connect = PenstockClient.from_run_dir if options.run_dir else PenstockClient
    async with connect(options.run_dir or options.url, api_key=os.environ.get("PENSTOCK_API_KEY", "")) as client:
        if options.submit:
            await client.submit_tasks(payloads, num_sessions=options.submit)
        done = await work(client, agent, at_once=options.at_once, idle_s=options.idle_s)
        print(f"{done.rewarded} sessions rewarded, {done.failed} failed, {done.lost} lost")
