"""Who may call the internal port of a rollout server, and how: the run's cluster key, and its certificates.

The `ClusterKey` protects the port: the learner and the gateway send it with each call. Every run has one: if the config
names no key file, the first process that needs the key makes it in the run's folder.

With `tls` in the config both sides also show a certificate, and the calls are encrypted. The files are read for each
connection, so that a renewed certificate counts at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import ssl
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from penstock.config.run import RunConfig
from penstock.config.service import TLS_NAME, TlsConfig
from penstock.errors import ConfigError

KEY_HEADER = "x-penstock-cluster-key"
KEY_FILE_NAME = "cluster.key"
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
        return cls(named or config.folder / KEY_FILE_NAME, may_make=named is None)

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
        with tempfile.NamedTemporaryFile("w", dir=self.file.parent, prefix=f".{KEY_FILE_NAME}-") as aside:
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
        return [(KEY_HEADER, self.read())]

    def is_in(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Return whether a call's metadata carries the key. The comparison takes constant time."""
        given = next((value for name, value in metadata if name == KEY_HEADER), "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(given_bytes, self.read().encode())


# ── certificates ──


class InternalChannels:
    """One channel to each internal port, by its address, and another one once a certificate was renewed. Channels are
    of one event loop."""

    def __init__(self, tls: TlsConfig, options: Iterable[tuple[str, Any]]) -> None:
        self._tls = tls
        self._options = [*options, ("grpc.ssl_target_name_override", TLS_NAME)]
        self._written: tuple[int, ...] = ()
        """When the files were written that the newest channels have read."""
        self._channels: dict[tuple[str, tuple[int, ...]], grpc.aio.Channel] = {}

    def to(self, address: str) -> grpc.aio.Channel:
        with contextlib.suppress(OSError):  # while files are being replaced, those that were read last count
            self._written = tuple(file.stat().st_mtime_ns for file in self._tls.files)
        channel = self._channels.get((address, self._written))
        if channel is None:
            channel = self._channels[address, self._written] = self._open(address)
        return channel

    def _open(self, address: str) -> grpc.aio.Channel:
        if not self._tls.files:
            return grpc.aio.insecure_channel(address, options=self._options)
        authority, certificate, key = (file.read_bytes() for file in self._tls.files)
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.aio.secure_channel(address, credentials, options=self._options)

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))


def open_internal_port(listener: grpc.aio.Server, address: str, tls: TlsConfig) -> int:
    """Returns the port. With certificates it takes only callers that show one. Raises RuntimeError if it is in use."""
    if not tls.files:
        return listener.add_insecure_port(address)

    def certificates() -> Any:
        authority, certificate, key = (file.read_bytes() for file in tls.files)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    credentials = grpc.dynamic_ssl_server_credentials(certificates(), certificates, require_client_authentication=True)
    return listener.add_secure_port(address, credentials)


def check_certificates(tls: TlsConfig) -> None:
    """Raise ConfigError unless two processes with these files would accept each other. Connects to nothing."""
    for name, file in zip(TlsConfig.model_fields, tls.files, strict=False):
        try:
            file.read_bytes()
        except OSError as error:
            raise ConfigError(f"tls.{name} {file} cannot be read: {error.strerror}") from error
    if not tls.files:
        return
    sent, answered = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        ours, theirs = (ssl.create_default_context(purpose, cafile=tls.ca_file) for purpose in ssl.Purpose)
        for context in (ours, theirs):
            context.load_cert_chain(str(tls.cert_file), tls.key_file)
        theirs.verify_mode = ssl.CERT_REQUIRED
        caller = ours.wrap_bio(answered, sent, server_hostname=TLS_NAME)
        listener = theirs.wrap_bio(sent, answered, server_side=True)
        for side in (caller, listener, caller):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
        listener.do_handshake()
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        raise ConfigError(f"tls: two processes with these files would refuse each other: {reason}") from error
