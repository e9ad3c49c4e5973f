"""Finds the sockets on which processes listen."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import psutil


def listeners(processes: Iterable[psutil.Process]) -> dict[str, str]:
    """The addresses on which the processes accept TCP connections, each with the command of its process."""
    found = {}
    for process in processes:
        try:
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    host, port = connection.laddr
                    found[f"{host} {port}"] = " ".join(process.cmdline()).strip()[:120]
        except psutil.NoSuchProcess:
            continue
    return found


def beyond_loopback(found: dict[str, str]) -> dict[str, str]:
    return {address: command for address, command in found.items() if not _is_loopback(address.split()[0])}


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
