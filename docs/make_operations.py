"""Write the table of operations in gateway.md, from their declarations in the gateway.

python docs/make_operations.py
"""

from __future__ import annotations

import re
from pathlib import Path

from penstock_services.gateway.operations import Operation
from penstock_services.gateway.run import OPERATIONS

PAGE = Path(__file__).parent / "gateway.md"
BEGIN = "<!-- This table is written by docs/make_operations.py. -->\n"
END = "<!-- The end of the table. -->\n"


def row(operation: Operation) -> str:
    names = [f"`{rpc.containing_service.name}.{rpc.name}`" for rpc in operation.rpcs]
    path, query = operation.path.replace("/v1/runs/{run}/", "…/"), ""
    if operation.takes is not None and operation.verb == "GET":
        fields = operation.takes.model_fields.items()
        query = "?" + "&".join(f"{field.alias or name}=" for name, field in fields)
    rest = f"`{operation.verb} {path}{query}`" if path else ""
    events = " (server-sent events)" if operation.event else ""
    return f"| {rest}{events} | {', '.join(names)} | {operation.scope} |"


def build() -> str:
    """The whole page, with its table made again."""
    shown = [operation for operation in OPERATIONS if operation.is_documented and operation.scope]
    table = ["| REST | gRPC | scope |", "|---|---|---|", *map(row, shown)]
    text = BEGIN + "\n".join(table) + "\n" + END
    return re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: text, PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(build())
