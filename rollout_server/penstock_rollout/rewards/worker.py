"""The reward process: `python -m penstock_rollout.rewards.worker`. It handles one request at a time.

Requests and answers are JSON frames on standard input and output: four bytes with the length, then the text.
multiprocessing's pipes are not used, because they carry pickles, and reading a pickle runs code that the other side
chose. The output of a reward function goes to standard error, and its standard input is empty. `settings` is JSON text.

    {"settings": settings, "calls": [{"data_source": ..., ...}, ...], "read": "score"}

builds the reward or tool unless it was built before, and makes each call with these keyword arguments. `read` says what
a result is: `score`, `scores` (a list of them, of a function that takes a batch) or `result` (of a tool, unchanged).

    {"answers": [{"result": ...}, ...], "seconds": 0.01, "description": "for the log"}

A call that fails, or the whole answer if the building fails, is {"error": "what happened", "traceback": "...", "place":
"..."}.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

from penstock_rollout.rewards.function import RewardFunction, SampleScore, WrongScore, build, read_score

NICENESS = 5
"""Gives generation priority over rewards."""
MAX_TRACEBACK_CHARS = 4000
_PR_SET_PDEATHSIG = 1


def main() -> int:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123  (a device)
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    os.nice(NICENESS)
    os.umask(0o022)  # the sandbox has its own user, which reads the files of a program
    # SIGTERM raises SystemExit, so that the sandbox ends its program on the way out.
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    functions: dict[str, RewardFunction] = {}
    while (request := _read(requests)) is not None:
        _write(answers, _answer(request, functions))
    # The parent closed the pipe or died. A SIGTERM while Python shuts down must not print a traceback.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return 0


def _answer(request: dict[str, Any], functions: dict[str, RewardFunction]) -> dict[str, Any]:
    settings: str = request["settings"]
    try:
        if settings not in functions:
            functions[settings] = build(json.loads(settings))
    except Exception as error:
        return _failed(error)
    function, read = functions[settings], _READERS[request["read"]]
    started = time.perf_counter()
    answers = [_called(function, arguments, read) for arguments in request["calls"]]
    seconds = time.perf_counter() - started
    return {"answers": answers, "seconds": seconds, "description": getattr(function, "description", "")}


def _called(function: RewardFunction, arguments: dict[str, Any], read: Callable[[Any], Any]) -> dict[str, Any]:
    """The result of one call, or why it has none. The next call has its own."""
    try:
        result = function(**arguments)
        return {"result": read(asyncio.run(result) if inspect.iscoroutine(result) else result)}
    except Exception as error:
        return _failed(error)


def _read_scores(results: Any) -> list[SampleScore]:
    """The scores that a batch function returned: a list with one entry per sample, or an array."""
    return [read_score(result) for result in (results.tolist() if hasattr(results, "tolist") else results)]


_READERS: dict[str, Callable[[Any], Any]] = {
    "score": read_score,
    "scores": _read_scores,
    "result": lambda result: result,
}


def _failed(error: Exception) -> dict[str, Any]:
    if isinstance(error, WrongScore):
        return {"error": str(error), "traceback": "", "place": type(error).__name__}
    return {"error": f"{type(error).__name__}: {error}"} | _origin(error)


def _origin(error: Exception) -> dict[str, str]:
    """Where the error was raised, without the frames of this module. Equal failures have the same place."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    lines += traceback.format_exception_only(error)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return {"traceback": "".join(lines)[-MAX_TRACEBACK_CHARS:], "place": f"{type(error).__name__} {place}".strip()}


def _read(requests: IO[bytes]) -> dict[str, Any] | None:
    header = requests.read(4)
    if len(header) < 4:
        return None
    request: dict[str, Any] = json.loads(requests.read(struct.unpack("<I", header)[0]))
    return request


def _write(answers: IO[bytes], answer: dict[str, Any]) -> None:
    text = json.dumps(answer).encode()
    answers.write(struct.pack("<I", len(text)) + text)
    answers.flush()


def _exit(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
