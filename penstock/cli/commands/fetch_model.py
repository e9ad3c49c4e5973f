"""`penstock fetch-model SOURCE TARGET`: fetch a model once into a folder that the processes of a run share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.cli.parser import Parser


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock fetch-model",
        description="Fetch a model once into a folder. Safe to kill, to repeat, and to start twice.",
        epilog="A private or gated model of the Hub needs HF_TOKEN. s3:// takes AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL, or the identity of a pod.",
    )
    parser.add_argument("source", help="Hub id such as Qwen/Qwen2.5-0.5B@main, s3://bucket/prefix, or a folder")
    parser.add_argument("target", type=Path, help="folder that then holds the model")
    parser.add_argument("--verify", action="store_true", help="read a folder that is complete already, and compare it")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="S", help="longest wait for another fetch or a store (3600)"
    )
    args = parser.parse_args(argv)
    from penstock.fetching.model_fetch import fetch_model

    print(fetch_model(args.source, args.target.absolute(), args.timeout, verify=args.verify))
    return 0
