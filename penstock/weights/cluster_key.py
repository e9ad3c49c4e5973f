"""The cluster key, which protects the internal port of the rollout servers.

The learner and the gateway send it with each call to a rollout server. Every run has one: if the config names no key
file, the first process that needs the key makes it in the run's folder.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.config.run import RunConfig
from penstock.errors import ConfigError

HEADER = "x-penstock-cluster-key"
FILE_NAME = "cluster.key"
"""Name of the key file in the run's folder."""
NUM_KEY_BYTES = 32


@dataclass(frozen=True)
class ClusterKey:
    """The key of a run. The file is read for each call, so that a replaced key counts at once."""

    file: Path
    may_make: bool
    """Whether a missing file is made. False if the config names the file: then the operator makes it."""

    @classmethod
    def of(cls, config: RunConfig) -> ClusterKey:
        named = config.weights.cluster_key_file
        return cls(named or config.folder / FILE_NAME, may_make=named is None)

    def check(self) -> None:
        """Raise ConfigError if there is no usable key and none would be made. Makes nothing."""
        if self.file.exists() or not self.may_make:
            self.read()

    def make_if_missing(self) -> None:
        """Make the file, which only its owner can read, if this run makes its own key. Processes that start at the same
        time end up with the same key. Raises ConfigError if there is no usable key."""
        if self.may_make and not self.file.exists():
            try:
                self._make()
            except OSError as error:
                raise ConfigError(f"the cluster key {self.file} cannot be made: {error.strerror}") from error
        self.read()

    def _make(self) -> None:
        """Write the key to another file and link it into place: the link fails if another process was first."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.file.parent, prefix=f".{FILE_NAME}-") as aside:
            aside.write(secrets.token_hex(NUM_KEY_BYTES))
            aside.flush()
            os.fsync(aside.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(aside.name, self.file)

    def read(self) -> str:
        """Return the key. Raises ConfigError if the file cannot be read or is empty."""
        name = "the cluster key" if self.may_make else "weights.cluster_key_file"
        try:
            key = self.file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"{name} {self.file} cannot be read: {error.strerror}") from error
        if not key:
            raise ConfigError(f"{name} {self.file} is empty; write a secret into it")
        return key

    def metadata(self) -> list[tuple[str, str]]:
        """Return the gRPC metadata that carries the key."""
        return [(HEADER, self.read())]

    def is_in(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Return whether a call's metadata carries the key. The comparison takes constant time."""
        given = next((value for name, value in metadata if name == HEADER), "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(given_bytes, self.read().encode())
