"""API keys: how they are created, and the file that holds their hashes.

A line is `NAME SCOPE sha256:HEX`. Empty lines and lines that begin with # are ignored. A key has 32 random bytes, so
no one can find it from its hash by trying, and the file is not a secret.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, time_ns
from typing import Literal, get_args

from penstock.config.service import GatewayConfig
from penstock.errors import ConfigError
from penstock.machine import write_private
from penstock.store.keys import NAME, check_name
from penstock.store.ownership import Owner

Scope = Literal["read", "submit", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""Each scope includes the ones before it. `read` reads, `submit` also submits prompts, evaluates and generates, and
`admin` also changes the run."""
OWN_KEY_FILE = "gateway.key"
"""File in a run's folder with the key of a gateway that has no other. Commands and clients on this machine read it."""


@dataclass(frozen=True)
class ApiKey:
    name: str
    scope: Scope
    digest: str

    @property
    def line(self) -> str:
        return f"{self.name} {self.scope} sha256:{self.digest}"

    @property
    def owner(self) -> Owner:
        """Owner of what the key makes: `@vision` for a key `alice@vision` of a team, its own name for one without."""
        _, at, team = self.name.rpartition("@")
        return Owner(at + team, self.scope == "admin")


def make_key(name: str, scope: Scope) -> tuple[str, ApiKey]:
    """Create a key. Return the secret, which is stored nowhere, and the entry for the keys file."""
    check_name("--name", name)
    secret = f"psk_{secrets.token_urlsafe(32)}"
    return secret, ApiKey(name, scope, digest_of(secret))


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
    try:
        if path.exists() and path.read_text().strip():
            path.chmod(0o600)
        else:
            write_private(path, make_key("local", "admin")[0] + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; set run_dir") from error
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
    file = KeyFile(path, "gateway.keys_file", parse_keys, grace_s=0)
    file.load()
    return file.keys


def parse_keys(text: str, path: Path) -> tuple[ApiKey, ...]:
    """The keys in the text of a file, which may be none. Raises ConfigError for a line that is not a key."""
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        words = line.split()
        has_form = len(words) == 3 and NAME.fullmatch(words[0]) and re.fullmatch(r"sha256:[0-9a-f]{64}", words[2])
        if not has_form or words[1] not in SCOPES:
            raise ConfigError(f"{path}:{number} is not `NAME SCOPE sha256:HEX`; make keys with `penstock keys make`")
        if any(key.name == words[0] for key in keys):
            raise ConfigError(f"{path}:{number} names a second key {words[0]!r}; remove one of them")
        keys.append(ApiKey(words[0], words[1], words[2].removeprefix("sha256:")))
    return tuple(keys)


logger = logging.getLogger(__name__)
RECENT_NS = 2_000_000_000
"""A file that changed this shortly before it was read may change again without another time stamp. It is read again."""

Parser = Callable[[str, Path], tuple[ApiKey, ...]]
Stamp = tuple[int, int, int, int]


class KeyFile:
    """One file of keys, which is followed while the gateway runs. `setting` is how messages call it.

    A file that is empty or missing has revoked its keys. One that cannot be read or parsed is probably a mistake, so
    the keys that were read before stay valid for `gateway.keys_grace_s`, and none after that."""

    def __init__(self, path: Path, setting: str, parse: Parser, grace_s: float) -> None:
        self.path = path
        self.setting = setting
        self.parse = parse
        self.grace_s = grace_s
        self.keys: tuple[ApiKey, ...] = ()
        self.problem = ""
        """Why the file cannot be used now; empty if it can."""
        self._stamp: Stamp | None = None
        self._must_read = True
        self._broken_since: float | None = None

    def load(self) -> None:
        """Read the file when the gateway starts. Raises ConfigError unless it holds a key."""
        self.refresh(is_logged=False)
        if self.problem:
            raise ConfigError(self.problem)
        self._report()

    def refresh(self, *, is_logged: bool = True) -> bool:
        """Read the file again if it has changed. Returns whether the keys have."""
        stamp = _stamp(self.path)
        if self._must_read or stamp != self._stamp:
            # The stamp is taken before the file is read. A change in between is seen the next time.
            self._must_read = stamp is not None and time_ns() - max(stamp[:2]) < RECENT_NS
            self._stamp = stamp
            return self._read(is_logged)
        return self._expire()

    def _read(self, is_logged: bool) -> bool:
        before, problem = self.keys, self.problem
        try:
            self.keys, self.problem, self._broken_since = self.parse(self.path.read_text(), self.path), "", None
            if not self.keys:
                self.problem = f"{self.setting} {self.path} holds no key; add one with `penstock keys make`"
        except FileNotFoundError:
            self.keys, self._broken_since = (), None
            self.problem = f"{self.setting} {self.path} does not exist; make it with `penstock keys make`"
        except (OSError, UnicodeDecodeError) as error:
            self.problem = f"{self.setting} {self.path} cannot be read: {error}"
        except ConfigError as error:
            self.problem = str(error)
        if self.problem and self.keys and self._broken_since is None:
            self._broken_since = monotonic()
        self._expire()
        if is_logged and (self.problem != problem or self.keys != before):
            self._report()
        return self.keys != before

    def _expire(self) -> bool:
        """Revoke the keys of a file that has been broken for too long."""
        if self._broken_since is None or monotonic() - self._broken_since < self.grace_s:
            return False
        self.keys, self._broken_since = (), None
        logger.error("%s; its keys are no longer valid, because %g s have passed", self.problem, self.grace_s)
        return True

    def _report(self) -> None:
        if not self.problem:
            logger.info("read %d API keys from %s", len(self.keys), self.path)
        elif self.keys:
            logger.error("%s; the keys that were read before stay valid for %g s", self.problem, self.grace_s)
        else:
            logger.error("%s; no key of this file is valid", self.problem)


def key_files_of(config: GatewayConfig, own_key_file: Path) -> list[KeyFile]:
    """The files that hold the keys of a gateway. One that has none configured uses its own key."""
    grace_s = config.keys_grace_s
    files = [KeyFile(config.keys_file, "gateway.keys_file", parse_keys, grace_s)] if config.keys_file else []
    if config.api_key_file is not None:
        files.append(KeyFile(config.api_key_file, "gateway.api_key_file", partial(_admin_key, "api_key_file"), grace_s))
    return files or [KeyFile(own_key_file, "the gateway's own key file", partial(_admin_key, "local"), grace_s)]


def _admin_key(name: str, secret: str, _: Path) -> tuple[ApiKey, ...]:
    """The key in a file that contains nothing else."""
    return (ApiKey(name, "admin", digest_of(secret.strip())),) if secret.strip() else ()


def _stamp(path: Path) -> Stamp | None:
    """Changes when the file's content or permissions do. None if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
