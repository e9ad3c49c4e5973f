"""The address at which Redis was last reached, for the time when its name is gone.

`helm uninstall` deletes the Service of Redis at once, while Redis itself waits for the processes that are stopping. The
name then resolves to nothing, but the address is still good: new connections go to the last one.
"""

from __future__ import annotations

import socket
from typing import Any


class LastAddress:
    """Address of the last connection that was made. It belongs to one client."""

    def __init__(self) -> None:
        self.host = ""

    def used_by(self, connection: type[Any]) -> type[Any]:
        """The asynchronous connection class, with this address as the fallback for a name that cannot be resolved."""
        last = self

        async def _connect(self: Any) -> None:
            try:
                await connection._connect(self)
            except socket.gaierror:
                if not last.host:
                    raise
                name, self.host = self.host, last.host
                try:
                    await connection._connect(self)
                finally:
                    self.host = name
            last.host = self._writer.get_extra_info("peername")[0]

        return type(connection.__name__, (connection,), {"_connect": _connect})

    def used_by_blocking(self, connection: type[Any]) -> type[Any]:
        """The same for a blocking connection class."""
        last = self

        def _connect(self: Any) -> Any:
            try:
                opened = connection._connect(self)
            except socket.gaierror:
                if not last.host:
                    raise
                name, self.host = self.host, last.host
                try:
                    opened = connection._connect(self)
                finally:
                    self.host = name
            last.host = opened.getpeername()[0]
            return opened

        return type(connection.__name__, (connection,), {"_connect": _connect})
