"""The options by which every client command finds its gateway."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.client import SyncPenstockClient

DEFAULT_RUN_DIR = Path("runs/demo")


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--run-dir", type=Path, default=DEFAULT_RUN_DIR, metavar="DIR",
        help="folder of a run on this machine (default: %(default)s)",
    )  # fmt: skip
    where.add_argument("--url", help="address of a gateway, such as http://gateway:8080")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the gateway's key")


def open_client(args: argparse.Namespace, deadline_s: float) -> SyncPenstockClient:
    from penstock.client import SyncPenstockClient

    api_key = _read_key(args.api_key_file)
    if args.url:
        return SyncPenstockClient(args.url, api_key=api_key, deadline_s=deadline_s)
    return SyncPenstockClient.from_run_dir(args.run_dir, api_key, deadline_s=deadline_s)


def _read_key(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error.strerror}") from error
