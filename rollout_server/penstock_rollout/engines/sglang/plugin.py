"""A plugin of SGLang that receives weights in its scheduler processes, and loads them at a flip.

Only the SGLang that a rollout server starts has it: `announce_plugin` writes the metadata by which SGLang finds it into
a private folder, which is on the PYTHONPATH of that server alone. The plugin has two hooks:

| hook                                      | effect                                                                   |
|-------------------------------------------|--------------------------------------------------------------------------|
| after Scheduler.__init__                  | a StageWorker answers calls on a socket in the private folder            |
| around DefaultModelLoader._get_weights... | a load of PRIVATE_FOLDER/VERSION gets that version's verified stage      |

So everything else of an update is SGLang's: the pause, the load itself, the version of tokens, the flush of the cache.

The private folder has one socket per scheduler, named by its rank, through which the rollout server calls the receiver.
A call is one line of JSON, and so is its answer:

    {"call": "verify", "arguments": {...}}  ──►  {"result": ...} or {"error": "one line"}
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock_rollout.weights.stage import StageSlot, WeightStage, device_uuid

FOLDER_VARIABLE = "PENSTOCK_SGLANG_FOLDER"
NAME = "penstock"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"
ANSWER_TIMEOUT_S = 60.0
"""Timeout of a call that needs no waiting. A scheduler answers in a thread, while it decodes."""
WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator"

_workers: list[StageWorker] = []
"""The receiver of this process, if it is a scheduler."""


def announce_plugin(folder: Path) -> dict[str, str]:
    """Write the plugin's metadata into the private folder. Returns the environment with which SGLang finds it."""
    metadata = folder / "penstock_sglang-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-sglang\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{NAME} = {__name__}:register\n")
    found = {FOLDER_VARIABLE: str(folder), "PYTHONPATH": _joined(os.pathsep, str(folder), "PYTHONPATH")}
    if os.environ.get("SGLANG_PLUGINS"):  # a list of the plugins that are loaded; without it, all are
        found["SGLANG_PLUGINS"] = _joined(",", NAME, "SGLANG_PLUGINS")
    return found


def _joined(separator: str, first: str, variable: str) -> str:
    return separator.join([first, *filter(None, [os.environ.get(variable)])])


def register() -> None:
    """Register the hooks. SGLang calls it in every one of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(SCHEDULER, start_worker, HookType.AFTER)
    HookRegistry.register(WEIGHTS, staged_or_files, HookType.AROUND)


def start_worker(result: None, scheduler: Any, *arguments: Any, **named: Any) -> None:
    updater = scheduler.tp_worker.model_runner.weight_updater
    device = torch.device("cuda", updater.gpu_id) if updater.device == "cuda" else torch.device("cpu")
    _workers.append(StageWorker(Path(scheduler.server_args.model_path), updater.tp_rank, device))
    serve_stage(socket_path(Path(os.environ[FOLDER_VARIABLE]), updater.tp_rank), _workers[-1])


def staged_or_files(original: Any, loader: Any, source: Any, *arguments: Any, **named: Any) -> Any:
    path = Path(source.model_or_path)
    if path.parent != Path(os.environ[FOLDER_VARIABLE]):
        return original(loader, source, *arguments, **named)
    return _workers[-1].tensors(int(path.name))


class StageWorker:
    """A `StageSlot`, and the stage that was verified. Another stage that begins does not abort it: it may be loading.

    The rollout server calls the methods named in CALLS, in threads of the scheduler's process. Arguments and results
    are plain values, never weights. Only `tensors` touches the serving weights, and only the scheduler calls it."""

    CALLS = ("device", "stage", "verify", "abort")

    def __init__(self, model_folder: Path, rank: int, device: torch.device) -> None:
        self._device = device
        self._slot = StageSlot(model_folder, device, rank)
        self._verified: WeightStage | None = None

    def device(self) -> str:
        """Return `cpu`, or the UUID of this process's GPU."""
        return device_uuid(self._device)

    def stage(self, announcement: str) -> None:
        """Start to receive the version of an AnnounceRequest in base64."""
        self._slot.begin(weights_pb2.AnnounceRequest.FromString(base64.b64decode(announcement)))

    def verify(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> float:
        """Wait for the version and compare its checksums. Returns how long it took to receive it. Raises
        WeightPushFailed if the version cannot be loaded."""
        self._verified = stage = self._slot.verified(policy_version, bucket_checksums, timeout_s)
        return stage.receive_s

    def abort(self) -> None:
        self._slot.abort()

    def tensors(self, policy_version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of a version that was verified. When they are consumed, it is the one loaded last."""
        stage = self._verified
        assert stage is not None and stage.manifest.policy_version == policy_version, "only what was verified is loaded"
        yield from stage.tensors()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the next stage fills these buffers again
        self._slot.loaded, self._verified = stage, None


def socket_path(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.sock"


def serve_stage(path: Path, worker: StageWorker) -> None:
    """Answer calls in threads of this process until it ends."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                self.wfile.write(json.dumps(_answer(worker, json.loads(line))).encode() + b"\n")

    server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    server.daemon_threads = True
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
        return all(path.exists() for path in self._paths)

    async def devices(self) -> tuple[str, ...]:
        return tuple(await self._call("device"))

    async def stage(self, announcement: weights_pb2.AnnounceRequest) -> None:
        await self._call("stage", announcement=base64.b64encode(announcement.SerializeToString()).decode())

    async def verify(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> float:
        """Wait until every scheduler has the version with these checksums. Returns how long it took to receive it."""
        arguments = {"policy_version": policy_version, "bucket_checksums": bucket_checksums, "timeout_s": timeout_s}
        return max(map(float, await self._call("verify", timeout_s + ANSWER_TIMEOUT_S, **arguments)))

    async def abort(self) -> None:
        await self._call("abort")

    async def _call(self, call: str, answer_s: float = ANSWER_TIMEOUT_S, /, **arguments: Any) -> list[Any]:
        """Return the answers in the order of ranks."""
        line = json.dumps({"call": call, "arguments": arguments}).encode() + b"\n"
        try:
            async with asyncio.timeout(answer_s):
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
