"""What the asyncio client and the synchronous client share: the gateway's address, how long to try, and bodies."""

from __future__ import annotations

import ssl
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import httpx
from pydantic import TypeAdapter

from penstock.client.address import CONFIGURED_RUN, GatewayAddress
from penstock.client.retries import Attempts
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.trajectory import Prompt

T = TypeVar("T")


class GatewayConnection:
    """An HTTP client bound to one gateway and one run.

    `timeout_s` bounds one attempt of a call, and `deadline_s` the call with all its retries. `tls` holds the
    authorities to trust and the client certificate to show; without it, the system's authorities are trusted.
    `transport` replaces httpx's transport, for example by `httpx.MockTransport` in a test."""

    http_class: ClassVar[Any]
    """`httpx.AsyncClient` or `httpx.Client`, which take the same arguments."""

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
        """Connect to the gateway of a run on this machine, for example `runs/demo-1`. A gateway without configured keys
        needs no `api_key` here: the one in its run's folder is used."""
        address = GatewayAddress.from_run_dir(folder, api_key)
        return cls(address.url, run=address.run, api_key=address.api_key, **options)

    def _attempts(self) -> Attempts:
        return Attempts(self.timeout_s, self.deadline_s)


def read_response(response: httpx.Response, kind: type[T], part: str = "") -> T:
    """Return the body as `kind`, or the field of it that is named `part`."""
    try:
        body = response.json()
        return TypeAdapter(kind).validate_python(body[part] if part else body)
    except (ValueError, KeyError, TypeError) as error:
        raise PenstockError(f"{response.url} did not answer as a gateway does ({error}); check the URL") from error


def prompt_body(prompt: Prompt) -> dict[str, Any]:
    """A prompt as the REST interface takes it. Optional sampling parameters are sent only where they are not the
    default, so that older gateways take prompts without them."""
    sampling = asdict(prompt.sampling) | {"stop": list(prompt.sampling.stop)}
    required = ("temperature", "top_p", "max_tokens", "seed")
    body: dict[str, Any] = {
        "sampling": {name: value for name, value in sampling.items() if value or name in required},
        "num_samples": prompt.num_samples,
        "agent_name": prompt.agent_name,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
        "priority": prompt.priority,
    }
    if prompt.messages:
        body["messages"] = prompt.chat
    if prompt.token_ids:
        body["token_ids"] = list(prompt.token_ids)
    return body
