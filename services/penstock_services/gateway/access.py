"""Who may call the gateway: API keys and their roles, how often each may call, and that only loopback goes without."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from penstock.api_keys import ROLES, ApiKey, Role, digest_of, find_key, read_keys
from penstock.config.service import GatewayConfig
from penstock.errors import ConfigError, PermissionDenied, RateLimited, Unauthenticated
from penstock.ports import is_loopback

SINGLE_KEY_NAME = "api_key_file"


@dataclass(frozen=True)
class Caller:
    """Who makes the call that is being answered."""

    name: str = "anonymous"
    role: Role = "admin"
    request_id: str = ""

    def asking(self, request_id: str) -> Caller:
        return Caller(self.name, self.role, request_id)

    def check(self, role: Role, operation: str) -> None:
        if self.role != role and ROLES.index(self.role) < ROLES.index(role):
            raise PermissionDenied(f"{operation} needs the role {role}; the key {self.name!r} has {self.role}")


CALLER: ContextVar[Caller] = ContextVar("caller")
"""Set by both protocols before a handler runs."""


class Access:
    """Admits callers. Without a key file everyone is, which only loopback allows."""

    def __init__(self, keys: tuple[ApiKey, ...], config: GatewayConfig) -> None:
        self.keys = keys
        self.config = config
        self._buckets: dict[str, _Bucket] = {}
        self._stamp = _stamp(config.keys_file)

    @classmethod
    def load(cls, config: GatewayConfig) -> Access:
        return cls(load_keys(config), config)

    def admit(self, authorization: str) -> Caller:
        """The caller that the header names, if it may call now. Takes the same time for every wrong key."""
        self._reload()
        caller = Caller()
        if self.keys:
            scheme, _, given = authorization.partition(" ")
            key = find_key(self.keys, given.strip())
            if scheme.lower() != "bearer" or key is None:
                raise Unauthenticated(
                    "this gateway needs its key: give --api-key-file, or send `Authorization: Bearer <key>`"
                )
            caller = Caller(key.name, key.role)
        if self.config.requests_per_s:
            bucket = self._buckets.setdefault(caller.name, _Bucket(self.config.burst_requests))
            bucket.take(self.config.requests_per_s, self.config.burst_requests)
        return caller

    def _reload(self) -> None:
        """Follow the keys file. One that became unreadable leaves the keys as they were."""
        if self.config.keys_file is None or (stamp := _stamp(self.config.keys_file)) in (self._stamp, None):
            return
        try:
            self.keys = load_keys(self.config)
        except ConfigError:
            return
        self._stamp = stamp


def load_keys(config: GatewayConfig) -> tuple[ApiKey, ...]:
    """The keys that are good. A public address without one is refused."""
    keys = read_keys(config.keys_file) if config.keys_file else ()
    if config.api_key_file is not None:
        keys = (*keys, ApiKey(SINGLE_KEY_NAME, "admin", digest_of(_read_single(config.api_key_file))))
    if not keys and not is_loopback(config.host):
        raise ConfigError(
            f"gateway.host {config.host} is not loopback and needs a key; "
            "set gateway.keys_file or gateway.api_key_file, or gateway.host to 127.0.0.1"
        )
    return keys


def _read_single(path: Path) -> str:
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gateway.api_key_file {path} cannot be read: {error}") from error
    if not key:
        raise ConfigError(f"gateway.api_key_file {path} is empty; write a key into it")
    return key


def _stamp(path: Path | None) -> tuple[int, int] | None:
    try:
        stat = path.stat() if path else None
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_size) if stat else None


class _Bucket:
    """As many calls as tokens, which come back at a steady rate."""

    def __init__(self, tokens: float) -> None:
        self.tokens = tokens
        self.filled_at = time.monotonic()

    def take(self, rate: float, most: int) -> None:
        now = time.monotonic()
        self.tokens = min(most, self.tokens + rate * (now - self.filled_at))
        self.filled_at = now
        if self.tokens < 1:
            wait_s = (1 - self.tokens) / rate
            raise RateLimited(f"more than {rate:g} calls a second; try again in {wait_s:.2f} s", wait_s)
        self.tokens -= 1
