"""API keys: how they are created, and the file that holds their hashes.

A line is `NAME ROLE sha256:HEX`. Empty lines and lines that begin with # are ignored. A key has 32 random bytes, so
nobody can find it from its hash by trying, and the file is not a secret.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from penstock.errors import ConfigError, InvalidInput

Role = Literal["read", "submit", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each role includes those before it. `read` reads, `submit` also submits prompts, evaluates and generates, and `admin`
also changes the run."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class ApiKey:
    name: str
    role: Role
    digest: str

    @property
    def line(self) -> str:
        return f"{self.name} {self.role} sha256:{self.digest}"


def make_key(name: str, role: Role) -> tuple[str, ApiKey]:
    """Create a key. Return the secret, which is stored nowhere, and the entry for the keys file."""
    if not _NAME.fullmatch(name):
        raise InvalidInput("--name", "must be 1 to 63 letters, digits or . _ - and start with a letter or digit")
    secret = f"psk_{secrets.token_urlsafe(32)}"
    return secret, ApiKey(name, role, digest_of(secret))


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def find_key(keys: Iterable[ApiKey], secret: str) -> ApiKey | None:
    """The entry of `secret`, or None. All entries are compared, each in constant time, so the time reveals nothing."""
    given, found = digest_of(secret), None
    for key in keys:
        if hmac.compare_digest(key.digest, given):
            found = key
    return found


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gateway.keys_file {path} cannot be read: {error}") from error
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        words = line.split()
        if len(words) != 3 or words[1] not in ROLES or not re.fullmatch(r"sha256:[0-9a-f]{64}", words[2]):
            raise ConfigError(f"{path}:{number} is not `NAME ROLE sha256:HEX`; make keys with `penstock keys make`")
        if any(key.name == words[0] for key in keys):
            raise ConfigError(f"{path}:{number} names a second key {words[0]!r}; remove one of them")
        keys.append(ApiKey(words[0], words[1], words[2].removeprefix("sha256:")))
    if not keys:
        raise ConfigError(f"gateway.keys_file {path} holds no key; make one with `penstock keys make`")
    return tuple(keys)
