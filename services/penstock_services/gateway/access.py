"""Who may call the gateway: the API key, and the rule that only loopback goes without one."""

from __future__ import annotations

import hmac

from penstock.config.service import GatewayConfig
from penstock.errors import ConfigError, Unauthenticated
from penstock.ports import is_loopback


def load_api_key(config: GatewayConfig) -> str:
    """The key of `api_key_file`, or "" where none is needed. A public address without a key is refused."""
    if config.api_key_file is None:
        if not is_loopback(config.host):
            raise ConfigError(
                f"gateway.host {config.host} is not loopback and needs a key; "
                "set gateway.api_key_file to a file that holds one, or gateway.host to 127.0.0.1"
            )
        return ""
    try:
        key = config.api_key_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gateway.api_key_file {config.api_key_file} cannot be read: {error}") from error
    if not key:
        raise ConfigError(f"gateway.api_key_file {config.api_key_file} is empty; write a key into it")
    return key


def check_authorization(header: str, api_key: str) -> None:
    """Raise Unauthenticated unless `header` is `Bearer <api_key>`. Takes the same time for every wrong key."""
    if not api_key:
        return
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), api_key.encode()):
        raise Unauthenticated("this gateway needs its key; send `Authorization: Bearer <key>`")
