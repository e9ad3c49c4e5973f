"""The cluster key: the publisher sends it with each call to a member, and the member checks it."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from penstock.config.weights import WeightsConfig
from penstock.errors import ConfigError

HEADER = "x-penstock-cluster-key"


def read_key(config: WeightsConfig) -> str:
    """Return the key, or an empty string if none is configured, which is allowed on loopback only."""
    if config.cluster_key_file is None:
        return ""
    try:
        key = config.cluster_key_file.read_text().strip()
    except OSError as error:
        path = config.cluster_key_file
        raise ConfigError(f"weights.cluster_key_file {path} cannot be read: {error.strerror}") from error
    if not key:
        raise ConfigError(f"weights.cluster_key_file {config.cluster_key_file} is empty; write a secret into it")
    return key


def call_metadata(config: WeightsConfig) -> list[tuple[str, str]]:
    """Return the gRPC metadata that carries the key."""
    key = read_key(config)
    return [(HEADER, key)] if key else []


def is_authorised(config: WeightsConfig, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Return whether a call's metadata carries the key. The comparison takes constant time."""
    wanted = read_key(config)
    given = next((value for name, value in metadata if name == HEADER), "")
    given_text = given.decode(errors="replace") if isinstance(given, bytes) else given
    return not wanted or hmac.compare_digest(given_text.encode(), wanted.encode())
