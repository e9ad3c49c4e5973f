"""What a gateway needs before it starts: keys and certificates. Imports no server, so that `penstock up --check` is
quick."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from penstock.config.service import GatewayConfig
from penstock.errors import ConfigError
from penstock_services.gateway.access import check_keys


@dataclass(frozen=True)
class Certificates:
    """The contents of the files of `gateway.tls_…`, in PEM."""

    key: bytes
    certificate: bytes
    client_authority: bytes | None
    """Signs the certificates of clients. None if clients need none."""


def check_gateway(config: GatewayConfig) -> None:
    """Raise ConfigError if keys or certificates are missing or cannot be read."""
    check_keys(config)
    read_certificates(config)


def read_certificates(config: GatewayConfig) -> Certificates | None:
    """The server's certificates, or None without TLS. Raises ConfigError for files that cannot be used."""
    if config.tls_cert_file is None or config.tls_key_file is None:
        return None
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=config.tls_client_ca_file).load_cert_chain(
            config.tls_cert_file, config.tls_key_file
        )
        authority = config.tls_client_ca_file.read_bytes() if config.tls_client_ca_file else None
        return Certificates(config.tls_key_file.read_bytes(), config.tls_cert_file.read_bytes(), authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"gateway.tls_cert_file, tls_key_file or tls_client_ca_file: {error}") from error
