"""The store through which the members of a process group meet."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not listed

from penstock.errors import Unavailable


def open_store(host: str, num_ranks: int, timeout: timedelta) -> TCPStore:
    """Open a store on a free port of `host`, and of no other address: anyone who reaches a store can write to it, and a
    TCPStore that opens its own port listens on every interface."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        if listener is not None:
            listener.close()
        raise Unavailable(
            f"cannot listen on {host}: {error.strerror}; it must be an address of this machine"
        ) from error
    port: int = listener.getsockname()[1]
    return TCPStore(
        host, port, num_ranks, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
