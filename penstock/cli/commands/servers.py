"""`penstock servers`: list, drain and undrain the rollout servers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.connection import add_gateway_arguments, open_client
from penstock.cli.json_output import to_json
from penstock.cli.parser import Parser
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.api.records import Server

DEADLINE_S = 5.0


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock servers",
        description="List, drain and undrain rollout servers. A drained server leases no prompts.",
    )
    parser.add_argument("action", nargs="?", default="list", choices=("list", "drain", "undrain"))
    parser.add_argument("server_id", nargs="?", help="server to drain or undrain")
    add_gateway_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if (args.action == "list") == bool(args.server_id):
        raise InvalidInput("server_id", "`drain` and `undrain` need a server id, and `list` takes none")
    with open_client(args, DEADLINE_S) as client:
        if args.action == "list":
            servers = client.servers()
        else:
            change = client.drain_server if args.action == "drain" else client.undrain_server
            servers = [change(args.server_id)]
    if args.json:
        print(to_json(servers))
        return 0
    _print(servers)
    return 0


def _print(servers: Sequence[Server]) -> None:
    from rich.console import Console

    from penstock.diagnosis.terminal import ADDRESS_COLUMNS, server_alarms, server_table

    console = Console()
    if not servers:
        console.print("no rollout server has joined; see `penstock status`")
        return
    console.print(server_table(servers, ADDRESS_COLUMNS))
    for line in server_alarms(servers):
        console.print(line)
