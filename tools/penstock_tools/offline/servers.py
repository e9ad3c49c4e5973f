"""`penstock generate --servers N`: a process for each of N engines, each with its own GPUs and shard."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from penstock.cli.output import progress_bar
from penstock.errors import ConfigError
from penstock.machine import visible_gpus
from penstock_tools.local.processes import WRONG_INPUT, ProcessGroup, gpus_of_servers
from penstock_tools.offline.answer_store import parts_in
from penstock_tools.offline.shard import Shard

POLL_S = 0.5
STOP_TIMEOUT_S = 60.0
"""A server that ends writes its finished rows."""


def divide_machine(num_servers: int, gpus_per_server: int) -> list[dict[str, str]]:
    """The environment of each server. Raises ConfigError if there are GPUs, but too few."""
    gpus = visible_gpus()
    environments = gpus_of_servers(num_servers, gpus_per_server, gpus)
    if gpus and not environments:
        raise ConfigError(
            f"--servers {num_servers} needs {num_servers * gpus_per_server} GPUs, but this machine has {len(gpus)}; "
            "lower --servers or rollout.engine.tensor_parallel_size"
        )
    return environments or [{}] * num_servers


def answer_in_servers(
    argv: Sequence[str], environments: Sequence[dict[str, str]], shard: Shard, folder: Path, num_prompts: int
) -> None:
    """Run the command `penstock generate`, whose words are `argv`, once for each server, until all have ended.

    A server that dies is reported on stderr, and the others go on. Raises its error if the input is wrong, which no
    other server would accept. SIGINT and SIGTERM end all servers, which keep their finished rows, and raise
    KeyboardInterrupt; a second SIGINT kills them."""
    processes, stopping, reported = ProcessGroup(folder / "logs"), threading.Event(), set[str]()
    processes.on_wait = partial(print, file=sys.stderr, flush=True)

    def stop(number: int, _: object) -> None:
        if stopping.is_set() and number == signal.SIGINT:
            processes.end_at_once()
        stopping.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for index, environment in enumerate(environments):
            command = server_command(argv, shard.split(index, len(environments)))
            processes.start(f"server-{index}", command, environment=environment, stop_timeout_s=STOP_TIMEOUT_S)
        names = [child.name for child in processes.children]
        print(f"starting {len(names)} engines; their logs: {folder / 'logs'}", file=sys.stderr, flush=True)
        with progress_bar(f"generating with {len(names)} servers") as progress:
            task, counted = progress.add_task("", total=num_prompts), dict[Path, int]()
            are_running = True
            while are_running and not stopping.wait(POLL_S):
                are_running = any(child.exit_code is None for child in processes.children)
                progress.advance(task, count_rows(folder, counted) - progress.tasks[task].completed)
                for child in processes.ended(may_finish=names):
                    if child.exit_code == WRONG_INPUT:
                        raise child.error()
                    if child.name not in reported:
                        reported.add(child.name)
                        progress.console.print(str(child.error()), markup=False, highlight=False, soft_wrap=True)
    finally:
        processes.stop(together=True)
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopping.is_set():
        raise KeyboardInterrupt


def server_command(argv: Sequence[str], shard: Shard) -> list[str]:
    return [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "generate",
        *argv,
        "--servers=1",
        f"--shard={shard}",
        "--verbose",
    ]


def count_rows(folder: Path, counted: dict[Path, int]) -> int:
    """Count the rows in the parts. `counted` has those of the parts that were read before."""
    for part in parts_in(folder):
        if part not in counted:
            with suppress(OSError, pa.ArrowException):  # the last server has just removed the folder
                counted[part] = parquet.read_metadata(part).num_rows
    return sum(counted.values())
