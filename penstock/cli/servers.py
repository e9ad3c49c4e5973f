"""`penstock servers`: list, drain and undrain the rollout servers of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from penstock.cli.connection import add_gateway_arguments, open_client
from penstock.cli.json_output import to_json
from penstock.errors import InvalidInput

DEADLINE_S = 5.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
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
    for server in servers:
        drained = "  drained" if server.is_drained else ""
        paused = f"  leasing paused: {server.breaker_reason}" if server.breaker_reason else ""
        off = f"{server.logprob_mismatch_nats:.3g} nats"
        quarantined = f"  quarantined: log-probs off by {off}" if server.is_quarantined else ""
        print(
            f"{server.server_id}  {server.state}  version {server.policy_version}  "
            f"{server.running_groups} groups  {server.engine}  {server.address}{drained}{paused}{quarantined}"
        )
    return 0
