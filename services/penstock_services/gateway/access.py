"""Access to the gateway: API keys with their scopes and call rates, callers, certificates, and allowed host names.

Imports no server, so that `penstock up --check` is quick.
"""

from __future__ import annotations

import ipaddress
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from penstock.api_keys import OWN_KEY_FILE, SCOPES, ApiKey, KeyFile, Scope, find_key, key_files_of, make_own_key
from penstock.config.service import GatewayConfig
from penstock.errors import ConfigError, PermissionDenied, RateLimited, Unauthenticated
from penstock.machine import is_loopback
from penstock.store.ownership import Owner

RECENT_S = 0.001
"""A key that was valid so short a time ago is not looked up again."""


@dataclass(frozen=True)
class Caller:
    """Who makes a request. Only `Access.authenticate` creates one, and every handler needs one."""

    name: str
    """Name of the API key."""
    scope: Scope
    request_id: str
    owner: Owner
    """Decides which sessions, tasks, datasets, evaluations and prompts the caller may use."""
    has_valid_key: Callable[[], bool]
    """A key can be removed while a body is received or a stream is open."""
    authenticated_at: float = field(default_factory=time.monotonic)

    def check(self, scope: Scope, operation: str) -> None:
        """Raise PermissionDenied without `scope` or a higher one, and Unauthenticated if the key was removed."""
        if time.monotonic() - self.authenticated_at > RECENT_S and not self.has_valid_key():
            raise Unauthenticated(f"the key {self.name!r} is no longer valid")
        if SCOPES.index(self.scope) < SCOPES.index(scope):
            raise PermissionDenied(f"{operation} needs the scope {scope}; the key {self.name!r} has {self.scope}")


class Access:
    """Authenticates callers and limits how often each one calls. No one is a caller without a key."""

    def __init__(self, files: list[KeyFile], config: GatewayConfig) -> None:
        self.files = files
        self.config = config
        self.keys: tuple[ApiKey, ...] = ()
        self._buckets: dict[str, _Bucket] = {}

    @classmethod
    def load(cls, config: GatewayConfig, folder: Path) -> Access:
        """Read the keys. A gateway on loopback without any makes one, in `gateway.key` in the run's folder."""
        check_keys(config)
        if config.keys_file is None and config.api_key_file is None:
            make_own_key(folder)
        access = cls(key_files_of(config, folder / OWN_KEY_FILE), config)
        for file in access.files:
            file.load()
        access.refresh()
        return access

    @property
    def problems(self) -> list[str]:
        """What is wrong with the files of keys."""
        return [file.problem for file in self.files if file.problem]

    def authenticate(self, authorization: str, request_id: str) -> Caller:
        """Return the caller whose key is in the Authorization header, if it may call now.

        The check takes the same time for every wrong key."""
        self.refresh()
        caller = self._caller(authorization, request_id)
        if self.config.requests_per_s:
            bucket = self._buckets.setdefault(caller.name, _Bucket(self.config.burst_requests))
            bucket.take(self.config.requests_per_s, self.config.burst_requests)
        return caller

    def _caller(self, authorization: str, request_id: str) -> Caller:
        scheme, _, secret = authorization.partition(" ")
        key = find_key(self.keys, secret.strip())
        if scheme.lower() == "bearer" and secret.strip() and key is None:
            raise Unauthenticated(
                "this API key is not one of the gateway's; it may be mistyped, or was removed. A gateway without "
                f"configured keys has its own in {OWN_KEY_FILE} of its run's folder"
            )
        if key is None or scheme.lower() != "bearer":
            raise Unauthenticated(
                "this gateway needs an API key: give --api-key-file, or send `Authorization: Bearer <key>`; a gateway "
                f"without configured keys writes one to {OWN_KEY_FILE} in its run's folder"
            )
        return Caller(key.name, key.scope, request_id, key.owner, partial(self._still_has, key))

    def _still_has(self, key: ApiKey) -> bool:
        self.refresh()
        return key in self.keys

    def refresh(self) -> None:
        """Read the files of keys again if they have changed."""
        changes = [file.refresh() for file in self.files]
        if any(changes) or not self.keys:
            self.keys = tuple(key for file in self.files for key in file.keys)


def check_keys(config: GatewayConfig) -> None:
    """Raise ConfigError if a configured file holds no key, or if a gateway that is not on loopback has none."""
    if config.keys_file is None and config.api_key_file is None:
        if not is_loopback(config.host):
            raise ConfigError(
                f"gateway.host {config.host} is not loopback and needs a key; "
                "set gateway.keys_file or gateway.api_key_file, or gateway.host to 127.0.0.1"
            )
        return
    for file in key_files_of(config, Path(OWN_KEY_FILE)):
        file.load()


class _Bucket:
    """A token bucket: each call takes one token, and tokens come back at a steady rate."""

    def __init__(self, tokens: float) -> None:
        self.tokens = tokens
        self.filled_at = time.monotonic()

    def take(self, rate: float, capacity: int) -> None:
        now = time.monotonic()
        self.tokens = min(capacity, self.tokens + rate * (now - self.filled_at))
        self.filled_at = now
        if self.tokens < 1:
            wait_s = (1 - self.tokens) / rate
            raise RateLimited(f"more than {rate:g} calls a second; try again in {wait_s:.2f} s", wait_s)
        self.tokens -= 1


Certificates = tuple[bytes, bytes, bytes | None]
"""The server's key, its certificate, and the authority of clients' certificates, if they need one; all in PEM."""


def check_gateway(config: GatewayConfig) -> None:
    """Raise ConfigError if keys or certificates are missing or cannot be read."""
    check_keys(config)
    read_certificates(config)


def read_certificates(config: GatewayConfig) -> Certificates | None:
    """The server's certificates, or None without TLS. Raises ConfigError for files that cannot be used."""
    certificate, key, authority = config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file
    if certificate is None or key is None:
        return None
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority).load_cert_chain(certificate, key)
        return key.read_bytes(), certificate.read_bytes(), authority.read_bytes() if authority else None
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"gateway.tls_cert_file, tls_key_file or tls_client_ca_file: {error}") from error


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
        """Whether a Host header names this gateway. Programs may omit it; browsers never do."""
        if not host or self.takes_any:
            return True
        name = _hostname(f"//{host}")
        if name in self.names or name.endswith(".localhost"):
            return True
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def allow_origin(self, origin: str, host: str) -> bool:
        """Whether a page of this origin may call: the gateway's own, or one of a host that is allowed by name."""
        scheme, _, place = origin.lower().partition("://")
        if scheme not in ("http", "https") or not place:
            return False
        return place == host.lower() or _hostname(f"//{place}") in self.configured


def _hostname(url: str) -> str:
    try:
        return "" if "@" in url else urlsplit(url).hostname or ""
    except ValueError:
        return ""
