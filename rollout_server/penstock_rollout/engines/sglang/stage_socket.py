"""The calls of a rollout server to the receivers in SGLang's scheduler processes, over Unix sockets.

A private folder has one socket per scheduler, named by its rank. A call is one line of JSON, and so is its answer:

    {"call": "verify", "arguments": {...}}  ──►  {"result": ...} or {"error": "one line"}
"""

from __future__ import annotations

import asyncio
import base64
import json
import socketserver
import threading
from pathlib import Path
from typing import Any

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock_rollout.engines.sglang.stage_worker import StageWorker

ANSWER_TIMEOUT_S = 60.0
"""Timeout of a call that needs no waiting. A scheduler answers in a thread beside the decoding."""


def socket_path(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.sock"


def serve_stage(path: Path, worker: StageWorker) -> None:
    """Answer calls in threads of this process until it ends."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                self.wfile.write(json.dumps(_answer(worker, json.loads(line))).encode() + b"\n")

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    server = Server(str(path), Handler)
    threading.Thread(target=server.serve_forever, name="stage-socket", daemon=True).start()


def _answer(worker: StageWorker, request: dict[str, Any]) -> dict[str, Any]:
    try:
        assert request["call"] in worker.CALLS, f"no call {request['call']}"
        return {"result": getattr(worker, request["call"])(**request["arguments"])}
    except Exception as error:
        return {"error": (str(error) or repr(error)).splitlines()[0]}


class StageCalls:
    """Each method calls all schedulers at once. A call that fails raises WeightPushFailed."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        self._paths = [socket_path(folder, rank) for rank in range(num_workers)]

    @property
    def are_served(self) -> bool:
        """Whether every scheduler has its receiver."""
        return all(path.exists() for path in self._paths)

    async def devices(self) -> tuple[str, ...]:
        return tuple(await self._call("device", {}))

    async def stage(self, announcement: weights_pb2.AnnounceRequest) -> None:
        serialized = base64.b64encode(announcement.SerializeToString()).decode()
        await self._call("stage", {"announcement": serialized})

    async def verify(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> float:
        """Wait until every scheduler has the version with these checksums. Returns how long it took to receive it."""
        arguments = {"policy_version": policy_version, "bucket_checksums": bucket_checksums, "timeout_s": timeout_s}
        answers = await self._call("verify", arguments, timeout_s + ANSWER_TIMEOUT_S)
        for answer in answers:
            if answer["why"]:
                raise WeightPushFailed(answer["why"])
        return max(float(answer["receive_s"]) for answer in answers)

    async def abort(self) -> None:
        await self._call("abort", {})

    async def _call(self, call: str, arguments: dict[str, Any], timeout_s: float = ANSWER_TIMEOUT_S) -> list[Any]:
        """Return the answers in the order of ranks."""
        line = json.dumps({"call": call, "arguments": arguments}).encode() + b"\n"
        try:
            async with asyncio.timeout(timeout_s):
                answers = await asyncio.gather(*(_ask(path, line) for path in self._paths))
        except (OSError, ValueError, TimeoutError) as error:
            raise WeightPushFailed(f"SGLang's scheduler did not answer {call}: {error!r}") from error
        for answer in answers:
            if "error" in answer:
                raise WeightPushFailed(f"{call} failed in SGLang's scheduler: {answer['error']}")
        return [answer["result"] for answer in answers]


async def _ask(path: Path, line: bytes) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(line)
        await writer.drain()
        answer: dict[str, Any] = json.loads(await reader.readline())
        return answer
    finally:
        writer.close()
