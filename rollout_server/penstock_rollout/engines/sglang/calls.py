"""The HTTP calls to the native endpoints of SGLang's server.

`/update_weights_from_tensor` must never be used, because it unpickles its request body.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from penstock.errors import InvalidInput, Unavailable, WeightPushFailed
from penstock.trajectory import FinishReason, Sampling, VersionSegment
from penstock_rollout.engines.engine import TokenChunk, clip_segments

CONTROL_TIMEOUT_S = 60.0
"""Timeout of a call that SGLang answers between two decode steps."""
LOAD_TIMEOUT_S = 600.0
POLL_TIMEOUT_S = 10.0

PauseMode = Literal["in_place", "retract"]
"""`in_place` keeps the KV cache of running requests. `retract` frees it, and SGLang computes it again later."""


class SglangCalls:
    """A client of one server on this host. Every method raises Unavailable if the server does not answer."""

    def __init__(self, port: int, api_key: str) -> None:
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=CONTROL_TIMEOUT_S,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=False,
        )

    async def is_ready(self) -> bool:
        """Return whether the server can generate. It generates a token to find out."""
        try:
            return (await self._client.get("/health")).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    async def version(self) -> str:
        return str((await self._get("/server_info"))["version"])

    async def load(self) -> tuple[int, float]:
        """Return the number of waiting requests and the usage of the KV cache. The server answers without waiting for
        the scheduler, even while weights are loaded."""
        loads = (await self._get("/v1/loads", POLL_TIMEOUT_S, include="core"))["loads"]
        usage = max((float(load["token_usage"]) for load in loads), default=0.0)
        return sum(load["num_waiting_reqs"] for load in loads), usage

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Yield the messages of one stream. There is no timeout between two messages, because decoding may be paused.
        If the server dies, the connection breaks."""
        timeout = httpx.Timeout(CONTROL_TIMEOUT_S, read=None)
        try:
            async with self._client.stream("POST", "/generate", json=body, timeout=timeout) as response:
                if response.is_error:
                    _refuse(response.status_code, (await response.aread()).decode(errors="replace"))
                async for line in response.aiter_lines():
                    name, _, data = line.partition(": ")
                    if name != "data":
                        continue
                    if data == "[DONE]":
                        return
                    message = json.loads(data)
                    if "error" in message:
                        error = message["error"]
                        _refuse(error.get("code", httpx.codes.BAD_REQUEST), error["message"])
                    yield message
        except httpx.HTTPError as error:
            raise Unavailable(f"the connection to SGLang broke during a response: {error!r}") from error

    async def abort(self, rid: str) -> None:
        """Abort a request; unknown ids are ignored. SGLang compares ids by prefix, so all must have the same length."""
        await self._post("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True})

    async def pause(self, mode: PauseMode) -> None:
        """Pause decoding. SGLang answers before its scheduler has stopped, but handles later calls after it has."""
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False})

    async def load_weights(self, folder: Path, policy_version: int, *, flush_cache: bool) -> None:
        """Load the weights that `folder` stands for and set the version, between two steps. Raises WeightPushFailed if
        the load failed. The state of SGLang's weights is unknown then, because it does not restore the old ones."""
        body = {
            "model_path": str(folder),
            "weight_version": str(policy_version),
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        response = await self._send("POST", "/update_weights_from_disk", LOAD_TIMEOUT_S, json=body)
        if response.is_error or not response.json()["success"]:
            raise WeightPushFailed(f"SGLang did not load the weights: {_first_line(response.text)}")

    async def close(self) -> None:
        await self._client.aclose()

    async def _get(self, path: str, timeout_s: float = CONTROL_TIMEOUT_S, **params: str) -> Any:
        return _checked(path, await self._send("GET", path, timeout_s, params=params)).json()

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        _checked(path, await self._send("POST", path, CONTROL_TIMEOUT_S, json=body))

    async def _send(self, method: str, path: str, timeout_s: float, **content: Any) -> httpx.Response:
        try:
            return await self._client.request(method, path, timeout=timeout_s, **content)
        except httpx.HTTPError as error:
            raise Unavailable(f"SGLang did not answer {path}: {error!r}") from error


def _checked(path: str, response: httpx.Response) -> httpx.Response:
    if response.is_error:
        raise Unavailable(f"SGLang answered {path} with {response.status_code}: {_first_line(response.text)}")
    return response


def _refuse(status_code: int, text: str) -> None:
    if status_code == httpx.codes.BAD_REQUEST:
        raise InvalidInput("prompt_token_ids", _first_line(text))
    raise Unavailable(f"SGLang refused a request with {status_code}: {_first_line(text)}")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]


NUCLEUS_TOP_K = 4000
"""SGLang reports log-probs after top-p only if top-k bounds the nucleus. The limit is 4096 tokens, ties included."""
FIRST_TOKEN_ONLY = 1 << 30
"""A stream interval that no response reaches: SGLang sends the first token, then all others at the end."""


def generate_body(
    rid: str, prompt_token_ids: tuple[int, ...], sampling: Sampling, *,
    max_tokens: int, stop_ids: list[int], seed: int, salt: str, chunk_tokens: int,
) -> dict[str, Any]:  # fmt: skip
    """Build the body. It always asks for a stream, because the first message shows that the request has started. A
    message follows after each `chunk_tokens` tokens. With FIRST_TOKEN_ONLY, the second message is the last one."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_new_tokens": max_tokens,
        "stop_token_ids": stop_ids,
        "sampling_seed": seed,
        "stream_interval": chunk_tokens,
    }
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(prompt_token_ids),
        "sampling_params": params,
        "return_logprob": True,
        "stream": True,
        "cache_salt": salt,
    }
    if sampling.ignore_eos:
        params |= {"ignore_eos": True, "stop_token_ids": []}
    if sampling.is_truncated:
        params["top_k"] = min(sampling.top_k or NUCLEUS_TOP_K, NUCLEUS_TOP_K)
        body["return_sampling_mask"] = True
    return body


@dataclass
class Response:
    """The tokens of one submission that have arrived, and how many of them were delivered."""

    version: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_delivered: int = 0
    finish_reason: dict[str, Any] | None = None
    """Why the response has ended, as SGLang says it. None while it has not."""
    spans: tuple[VersionSegment, ...] | None = None
    """Which version produced which tokens. SGLang reports it in the last message of a stream only."""

    def add(self, message: dict[str, Any], sampling: Sampling) -> None:
        """Read a message. The last message of an aborted request repeats earlier tokens; they are dropped."""
        meta, output_ids = message["meta_info"], message["output_ids"]
        num_new = max(meta.get("completion_tokens", 0) - len(self.token_ids), 0)
        if sampling.is_truncated:
            log_probs = meta.get("output_token_sampling_logprobs", [])
        else:
            log_probs = [entry[0] for entry in meta.get("output_token_logprobs", [])]
        token_ids = output_ids[len(output_ids) - num_new :] if num_new else []
        log_probs = log_probs[len(log_probs) - num_new :] if num_new else []
        if not len(token_ids) == len(log_probs) == num_new:
            raise Unavailable(f"SGLang sent {len(token_ids)} ids and {len(log_probs)} log-probs for {num_new} tokens")
        self.token_ids += token_ids
        self.log_probs += log_probs
        self.finish_reason = meta.get("finish_reason")
        if (spans := meta.get("weight_versions")) is not None:
            self.spans = tuple(VersionSegment(span["start"], span["end"], int(span["version"])) for span in spans)

    def take(self, finish_reason: FinishReason | None = None) -> TokenChunk:
        """Return the tokens that were not delivered yet. Without `spans`, all belong to the version at submission."""
        start, end = self.num_delivered, len(self.token_ids)
        self.num_delivered = end
        segments = clip_segments(
            (VersionSegment(0, end, self.version),) if self.spans is None else self.spans, start, end
        )
        if sum(segment.end - segment.start for segment in segments) != end - start:
            raise Unavailable(f"SGLang did not report which version produced tokens {start} to {end}: {self.spans}")
        return TokenChunk(tuple(self.token_ids[start:]), tuple(self.log_probs[start:]), segments, finish_reason)
