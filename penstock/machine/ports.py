"""Free ports and listening addresses."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import time
from collections.abc import Callable


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only. False for every name but localhost, because what a name
    resolves to can change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keep_collectives_on_loopback() -> None:
    """Make gloo and NCCL, in this process and its children, accept connections on loopback only. Does not replace what
    the environment says."""
    interface = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now. Bind it soon, before another process does."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def wait_for_port(host: str, port: int, timeout_s: float, while_true: Callable[[], bool] = lambda: True) -> bool:
    """Wait until something accepts connections. Return False after `timeout_s`, or when `while_true()` is false."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and while_true():
        try:
            with socket.create_connection((host, port), timeout=1):
                return True
        except OSError:
            time.sleep(0.05)
    return False
