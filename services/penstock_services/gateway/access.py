"""Access to the gateway: API keys, the role and the call rate of each, and the caller of a request."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.api_keys import ROLES, ApiKey, Role, digest_of, find_key, read_keys
from penstock.config.service import GatewayConfig
from penstock.errors import ConfigError, PermissionDenied, RateLimited, Unauthenticated
from penstock.ports import is_loopback

logger = logging.getLogger(__name__)
SINGLE_KEY_NAME = "api_key_file"
KEYLESS_NAME = "anonymous"


@dataclass(frozen=True)
class Caller:
    """Who makes a request. Only `Access.authenticate` creates one, and every handler needs one."""

    name: str
    """Name of the API key; `anonymous` on a gateway without keys."""
    role: Role
    request_id: str

    def check(self, role: Role, operation: str) -> None:
        """Raise PermissionDenied unless this caller has `role` or a higher one."""
        if ROLES.index(self.role) < ROLES.index(role):
            raise PermissionDenied(f"{operation} needs the role {role}; the key {self.name!r} has {self.role}")


class Access:
    """Authenticates callers and limits how often each one calls.

    A gateway without keys, which is only allowed on loopback, treats every caller as an admin."""

    def __init__(self, keys: tuple[ApiKey, ...], config: GatewayConfig) -> None:
        self.keys = keys
        self.config = config
        self.keys_problem = ""
        """Why the keys file cannot be used now; empty if it can. The keys that were read before stay valid."""
        self._buckets: dict[str, _Bucket] = {}
        self._stamp = _stamp(config.keys_file)

    @classmethod
    def load(cls, config: GatewayConfig) -> Access:
        return cls(load_keys(config), config)

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
        if not self.keys:
            return Caller(KEYLESS_NAME, "admin", request_id)
        scheme, _, secret = authorization.partition(" ")
        key = find_key(self.keys, secret.strip())
        if scheme.lower() != "bearer" or key is None:
            raise Unauthenticated(
                "this gateway needs an API key: give --api-key-file, or send `Authorization: Bearer <key>`"
            )
        return Caller(key.name, key.role, request_id)

    def refresh(self) -> None:
        """Read the keys file again if it has changed. If it cannot be used, log that once and keep the keys."""
        if self.config.keys_file is None or (stamp := _stamp(self.config.keys_file)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self.keys, self.keys_problem = load_keys(self.config), ""
        except ConfigError as error:
            self.keys_problem = str(error)
            logger.error("%s; the keys that were read before stay valid", error)
        else:
            logger.info("read %d API keys from %s", len(self.keys), self.config.keys_file)


def load_keys(config: GatewayConfig) -> tuple[ApiKey, ...]:
    """Read every configured key. A gateway that is not on loopback must have at least one."""
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


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Changes when the file's content or permissions do. None if there is no file."""
    try:
        stat = path.stat() if path else None
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size) if stat else None


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
