"""Files of API keys, which are followed while the gateway runs.

A file that is empty or gone has revoked its keys. A file that cannot be read or parsed is probably a mistake, so the
keys that were read before stay valid for `gateway.keys_grace_s`, and none after that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic, time_ns

from penstock.api_keys import ApiKey, digest_of, parse_keys
from penstock.config.service import GatewayConfig
from penstock.errors import ConfigError

logger = logging.getLogger(__name__)
SINGLE_KEY_NAME = "api_key_file"
OWN_KEY_NAME = "local"
"""Name of the key that a gateway makes for itself."""
RECENT_NS = 2_000_000_000
"""A file that changed this shortly before it was read may change again without another time stamp. It is read again."""

Parser = Callable[[str, Path], tuple[ApiKey, ...]]
Stamp = tuple[int, int, int, int]


class KeyFile:
    """One file of keys. `setting` is how messages call it."""

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

    @classmethod
    def of_hashes(cls, path: Path, grace_s: float) -> KeyFile:
        return cls(path, "gateway.keys_file", parse_keys, grace_s)

    @classmethod
    def of_secret(cls, path: Path, grace_s: float, setting: str, name: str) -> KeyFile:
        """A file that contains one key of the role admin."""

        def parse(text: str, _: Path) -> tuple[ApiKey, ...]:
            secret = text.strip()
            return (ApiKey(name, "admin", digest_of(secret)),) if secret else ()

        return cls(path, setting, parse, grace_s)

    def load(self) -> None:
        """Read the file when the gateway starts. Raises ConfigError unless it holds a key."""
        self.refresh(is_logged=False)
        if self.problem:
            raise ConfigError(self.problem)
        logger.info("read %d API keys from %s", len(self.keys), self.path)

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
    """The files that hold the keys of a gateway. One that has none configured uses a key of its own."""
    files = [KeyFile.of_hashes(config.keys_file, config.keys_grace_s)] if config.keys_file else []
    if config.api_key_file is not None:
        files.append(
            KeyFile.of_secret(config.api_key_file, config.keys_grace_s, "gateway.api_key_file", SINGLE_KEY_NAME)
        )
    return files or [KeyFile.of_secret(own_key_file, config.keys_grace_s, "the gateway's own key file", OWN_KEY_NAME)]


def _stamp(path: Path) -> Stamp | None:
    """Changes when the file's content or permissions do. None if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
