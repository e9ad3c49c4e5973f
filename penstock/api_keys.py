"""API keys: how they are created, and the file that holds their hashes.

A line is `NAME ROLE sha256:HEX`. Empty lines and lines that begin with # are ignored. A key has 32 random bytes, so
nobody can find it from its hash by trying, and the file is not a secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
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
OWN_KEY_FILE = "gateway.key"
"""File in a run's folder with the key of a gateway that has no other. Commands and clients on this machine read it."""
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


def make_own_key(folder: Path) -> Path:
    """Make `gateway.key`, which contains a key and which only its owner can read, unless it is there."""
    path = folder / OWN_KEY_FILE
    secret, _ = make_key("local", "admin")
    partial = folder / f".{secrets.token_hex(8)}.key"
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secret + "\n")
        if path.exists() and path.read_text().strip():
            path.chmod(0o600)
        else:
            partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; set run_dir") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_secret(path: Path | None) -> str:
    """The key in a file, for example of `gateway.api_key_file`. Empty without a file."""
    if path is None:
        return ""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API key in {path} cannot be read: {error}") from error


def read_own_key(folder: Path) -> str:
    """The key that the gateway of this run's folder has made; empty if there is none, or if it is not ours to read."""
    try:
        return (folder / OWN_KEY_FILE).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file. Raises ConfigError if there is none."""
    try:
        keys = parse_keys(path.read_text(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gateway.keys_file {path} cannot be read: {error}") from error
    if not keys:
        raise ConfigError(f"gateway.keys_file {path} holds no key; make one with `penstock keys make`")
    return keys


def parse_keys(text: str, path: Path) -> tuple[ApiKey, ...]:
    """The keys in the text of a file, which may be none. Raises ConfigError for a line that is no key."""
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
    return tuple(keys)
