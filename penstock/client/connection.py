"""What both clients are made of: where the gateway is, how long to try, and the HTTP client that sends."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, ClassVar, Self

from penstock.client.rest_calls import CONFIGURED_RUN, Attempts, GatewayAddress


class GatewayConnection:
    """`deadline_s` bounds one call with all its repetitions, `timeout_s` one attempt. `tls` says whom to trust, and
    which certificate to show; without it the system's authorities are trusted."""

    http_class: ClassVar[Any]
    """httpx's client, which takes the same arguments for asyncio and without."""

    def __init__(
        self,
        url: str,
        *,
        run: str = CONFIGURED_RUN,
        api_key: str = "",
        timeout_s: float = 30.0,
        deadline_s: float = 60.0,
        tls: ssl.SSLContext | None = None,
        transport: Any = None,
    ) -> None:
        self.address = GatewayAddress(url, run, api_key)
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self._http = self.http_class(
            base_url=url, headers=self.address.headers, transport=transport, verify=tls or True, trust_env=False
        )

    @classmethod
    def from_run_dir(cls, folder: Path | str, api_key: str = "", **options: Any) -> Self:
        address = GatewayAddress.from_run_dir(folder, api_key)
        return cls(address.url, run=address.run, api_key=api_key, **options)

    def _attempts(self) -> Attempts:
        return Attempts(self.timeout_s, self.deadline_s)
