"""A stand-in for SGLang's server, with a tiny model on a CPU and SGLang's flags, endpoints, messages and event order.

It runs in place of SGLang: `python -m support.sglang.stand_in --model-path ... --port ...`. Every request and
flag is checked against schema.json, which make_schema.py has made from SGLang's sources, and refused if it differs.

| variable          | meaning                                                                                       |
|-------------------|-----------------------------------------------------------------------------------------------|
| STAND_IN_FAULT    | a file; while it contains one of the words below, the server misbehaves                       |
| STAND_IN_VERSION  | the version that the server reports                                                           |
| STAND_IN_REQUESTS | a file to which the server writes one JSON line per request                                   |
| STAND_IN_HELPER   | a file for the pid of a process that the server starts and does not end, as SGLang does       |

The faults are `die_on_update` (exits in the middle of a load), `update_fails` (loads, then reports a failure),
`die_on_generate`, and `silent` (does not answer /v1/loads).
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from jsonschema import Draft202012Validator

SCHEMA = json.loads((Path(__file__).parent / "schema.json").read_text())
MAX_MASK_TOKENS = 4096
Message = dict[str, Any]
_T = TypeVar("_T")


def parse_flags(argv: list[str]) -> dict[str, str]:
    """Parse the command line. Exits as argparse would if SGLang does not have a flag."""
    flags: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        kind = SCHEMA["flags"].get(word)
        if kind is None:
            sys.exit(f"launch_server.py: error: unrecognized arguments: {word}")
        flags[word] = "" if kind == "switch" else next(words)
    return flags


def fault() -> str:
    path = os.environ.get("STAND_IN_FAULT")
    return Path(path).read_text().strip() if path and Path(path).exists() else ""


def record(path: str, body: Message) -> None:
    if log := os.environ.get("STAND_IN_REQUESTS"):
        with Path(log).open("a") as file:
            file.write(json.dumps({"path": path, "body": body}) + "\n")


def start_helper() -> None:
    if path := os.environ.get("STAND_IN_HELPER"):
        Path(path).write_text(str(subprocess.Popen(["sleep", "600"]).pid))


class StandIn:
    """Stands in for SGLang's TokenizerManager: it holds requests back during a pause, and passes them to the scheduler
    and the results back."""

    def __init__(self, flags: dict[str, str]) -> None:
        from support.sglang.scheduler import Scheduler  # imports torch: flags are refused before that

        self.max_len = int(flags["--context-length"])
        self.scheduler = Scheduler(
            Path(flags["--model-path"]),
            max_running=int(flags["--max-running-requests"]),
            max_len=self.max_len,
            seed=int(flags["--random-seed"]),
            version=flags["--weight-version"],
            deterministic="--enable-deterministic-inference" in flags,
        )
        assert flags.keys() >= {"--skip-tokenizer-init", "--incremental-streaming-output"}
        self.overlaps = "--disable-overlap-schedule" not in flags
        self.is_pause = False
        self.is_drained = False
        self.unpaused = asyncio.Condition()
        self.states: set[str] = set()

    async def ask(self, question: Callable[[], _T]) -> _T:
        """The scheduler's answer, given between two steps."""
        loop, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def run() -> None:
            result = question()
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(result))

        self.scheduler.call(run)
        found: _T = await answer
        return found

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[Message]:
        self._check(body)
        self.states.add(body["rid"])
        try:
            async with self.unpaused:
                await self.unpaused.wait_for(lambda: not self.is_pause)
            loop, messages = asyncio.get_running_loop(), asyncio.Queue[Message]()
            req = self.scheduler.new_req(body, lambda message: loop.call_soon_threadsafe(messages.put_nowait, message))
            self.scheduler.submit(req)
            while True:
                message = await messages.get()
                yield message
                if message["meta_info"]["finish_reason"] is not None:
                    return
        finally:
            self.states.discard(body["rid"])

    def _check(self, body: dict[str, Any]) -> None:
        params = body["sampling_params"]
        total = len(body["input_ids"]) + params["max_new_tokens"]
        if len(body["input_ids"]) >= self.max_len or total > self.max_len:
            raise ValueError(
                f"Requested token count exceeds the model's maximum context length of {self.max_len} tokens."
            )
        if body["rid"] in self.states:
            raise ValueError(f"Duplicate request ID detected: {body['rid']}")
        if body.get("return_sampling_mask") and not 1 < params.get("top_k", 1 << 30) <= MAX_MASK_TOKENS:
            raise ValueError("return_sampling_mask requires top_k=1 for greedy sampling or finite top_k")

    async def pause(self, mode: str) -> None:
        async with self.unpaused:
            self.is_pause, self.is_drained = True, mode == "retract" or not self.overlaps
            self.scheduler.call(lambda: self.scheduler.pause(mode))

    async def resume(self) -> None:
        async with self.unpaused:
            self.is_pause = False
            self.scheduler.call(self.scheduler.resume)
            self.unpaused.notify_all()

    async def update(self, body: dict[str, Any]) -> tuple[bool, str]:
        assert self.is_pause, "an update of a server that is not paused would wait for all its requests"
        assert self.is_drained, "a token of the step in flight would be stamped with the next version"
        folder, version = Path(body["model_path"]), body.get("weight_version")
        if fault() == "die_on_update":
            os._exit(3)
        flush_cache = body.get("flush_cache", True)
        success, message = await self.ask(lambda: self.scheduler.load(folder, version, flush_cache))
        return (False, "Failed to update weights: injected.") if fault() == "update_fails" else (success, message)


def make_app(flags: dict[str, str]) -> FastAPI:
    app, server = FastAPI(), StandIn(flags)
    validators = {route: Draft202012Validator(schema) for route, schema in SCHEMA["requests"].items()}

    @app.middleware("http")
    async def admit(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        path = request.url.path
        if not path.startswith(("/health", "/metrics")):
            sent = request.headers.get("Authorization", "")
            if not secrets.compare_digest(sent.encode(), f"Bearer {flags['--api-key']}".encode()):
                return JSONResponse({"error": "Unauthorized"}, status_code=401)
        if request.method == "POST":
            body = await request.json()
            record(path, body)
            errors = [error.message for error in validators[path].iter_errors(body)]
            if errors:
                return JSONResponse({"object": "error", "message": errors[0], "code": 400}, status_code=400)
        return await call_next(request)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    @app.get("/server_info")
    async def server_info() -> Message:
        return {"version": os.environ.get("STAND_IN_VERSION", SCHEMA["sglang"]), "internal_states": []}

    @app.get("/v1/loads")
    async def loads() -> Message:
        while fault() == "silent":
            await asyncio.sleep(0.1)
        return {"version": SCHEMA["sglang"], "loads": [server.scheduler.load_snapshot()]}

    @app.get("/metrics")
    async def metrics() -> Response:
        running = server.scheduler.load_snapshot()["num_running_reqs"]
        lines = ["# TYPE sglang:num_running_reqs gauge", f'sglang:num_running_reqs{{model_name="tiny"}} {running}']
        lines += ["# TYPE python_info gauge", 'python_info{version="3"} 1', ""]
        return Response("\n".join(lines), media_type="text/plain; version=0.0.4")

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        body = await request.json()
        if fault() == "die_on_generate":
            os._exit(3)
        assert body["stream"], "the engine streams everything"

        async def stream() -> AsyncIterator[bytes]:
            try:
                async for message in server.generate(body):
                    yield b"data: " + json.dumps(message).encode() + b"\n\n"
            except ValueError as error:
                content = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
                yield b"data: " + json.dumps({"error": content}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    @app.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = await request.json()
        rid, everything = body.get("rid") or "", body.get("abort_all", False)
        if everything or rid in server.states:
            server.scheduler.call(lambda: server.scheduler.abort(rid, everything))
        return Response(status_code=200)

    @app.post("/pause_generation")
    async def pause_generation(request: Request) -> Message:
        mode = (await request.json()).get("mode", "abort")
        assert mode != "abort", "that would end every request"
        await server.pause(mode)
        return {"message": "Generation paused successfully.", "status": "ok"}

    @app.post("/continue_generation")
    async def continue_generation() -> Message:
        await server.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(request: Request) -> Response:
        success, message = await server.update(await request.json())
        content = {"success": success, "message": message, "num_paused_requests": 0}
        return JSONResponse(content, status_code=200 if success else 400)

    start_helper()
    server.scheduler.start()
    return app


def end_after(failure: threading.ExceptHookArgs) -> None:
    """Print why a thread has died, and end. Without its scheduler the server would leave every request unanswered."""
    sys.excepthook(failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback)
    os._exit(70)


if __name__ == "__main__":
    threading.excepthook = end_after
    parsed = parse_flags(sys.argv[1:])
    uvicorn.run(make_app(parsed), host=parsed["--host"], port=int(parsed["--port"]), log_level="warning")
