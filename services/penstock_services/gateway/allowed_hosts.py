"""The names by which browsers may reach a gateway."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from penstock.config.service import GatewayConfig
from penstock.machine.ports import is_loopback

ANY = "*"


class AllowedHosts:
    """Decides about the headers Host and Origin.

    Addresses are always allowed: a name can be pointed at a foreign address, an address cannot. So is `localhost`.
    Other names must be in `gateway.allowed_hosts`. If that is empty, a gateway on loopback has no other name, and one
    on a public address has any, because every call needs a key."""

    def __init__(self, config: GatewayConfig) -> None:
        self.configured = frozenset(name.lower() for name in config.allowed_hosts)
        self.takes_any = ANY in self.configured or not (self.configured or is_loopback(config.host))
        self.names = self.configured | {config.host.lower(), "localhost"}

    def allow(self, host: str) -> bool:
        """Whether a Host header names this gateway. Programs may leave it out; browsers never do."""
        if not host or self.takes_any:
            return True
        name = _hostname(f"//{host}")
        return name in self.names or name.endswith(".localhost") or _is_address(name)

    def allow_origin(self, origin: str, host: str) -> bool:
        """Whether a page of this origin may call: a page of the gateway itself, or of a host that is allowed by
        name."""
        scheme, _, place = origin.lower().partition("://")
        if scheme not in ("http", "https") or not place:
            return False
        return place == host.lower() or _hostname(f"//{place}") in self.configured


def _hostname(url: str) -> str:
    try:
        return "" if "@" in url else urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
