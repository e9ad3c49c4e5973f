"""A pool of processes that compute rewards, and what runs in such a process: `python -m penstock_rollout.rewards.pool`.

A process that takes too long is killed and replaced. One that dies is replaced too, and its sample is scored once more,
because another sample or the machine may be the cause.

A process handles one request at a time. Requests and answers are lines of JSON on its standard input and output.
multiprocessing's pipes are not used, because they carry pickles, and reading a
pickle runs code that the other side chose. The output of a reward function goes to standard error, and its standard
input is empty. `settings` is JSON text.

    {"settings": settings, "calls": [{"data_source": ..., ...}, ...], "read": "score"}

builds the reward or tool unless it was built before, and makes each call with these keyword arguments. `read` says what
a result is: `score`, `scores` (a list of them, of a function that takes a batch) or `result` (of a tool, unchanged).

    {"answers": [{"result": ...}, ...], "seconds": 0.01, "description": "for the log"}

A call that fails, or the whole answer if the building fails, is {"error": "what happened", "traceback": "...", "place":
"..."}.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import logging
import os
import signal
import sys
import time
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from penstock_rollout.rewards.function import RewardFunction, WrongScore, build, read_score

logger = logging.getLogger(__name__)
PREPARE_TIMEOUT_S = 120.0
"""Deadline for starting a process and importing a reward's modules. The reward's own deadline starts afterwards."""
TERMINATE_S = 1.0
"""How long a process may take to end its programs after SIGTERM."""
KILL_S = 10.0
"""How long the kernel may take to end a process after SIGKILL."""
TOGETHER_TIMEOUT_S = 3.0
"""Upper bound on the deadline of samples that are scored together, which is hundreds of times what they should take."""
MAX_ANSWER_BYTES = 2**26
DIED = "worker_died"
TOGETHER_S = 0.005
"""Upper bound on the expected time of one message. It is how much longer a prompt may wait for its scores."""
WEIGHT = 0.2
"""Weight of the newest message in the mean."""

Json = dict[str, Any]
T = TypeVar("T")


class RewardPace:
    """The mean seconds that each reward has taken per sample, by its settings.

    A message to a process and back takes longer than most rewards: two changes of process, and JSON. So samples whose
    rewards are fast travel together. Slow ones travel alone, so that they are computed in all processes concurrently.
    """

    def __init__(self) -> None:
        self._mean_s: dict[str, float] = {}

    def parts(self, settings: str, samples: Sequence[T]) -> list[Sequence[T]]:
        """Divide the samples into messages. As long as nothing is known of a reward, its samples go alone."""
        mean_s = self._mean_s.get(settings, TOGETHER_S)
        size = max(1, min(len(samples), int(TOGETHER_S / max(mean_s, 1e-9))))
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def note(self, settings: str, seconds: float, num_samples: int) -> None:
        """A message with this many samples has taken this long in its process."""
        new = seconds / num_samples
        self._mean_s[settings] = new + (1 - WEIGHT) * (self._mean_s.get(settings, new) - new)

    def forget(self, settings: str) -> None:
        """A message has failed as a whole: the next samples go alone."""
        self._mean_s.pop(settings, None)


class RewardFailed(Exception):
    """A reward could not be computed. `kind` is `exception` (the function raised), `timeout` or `worker_died`.

    `place` is equal for failures of the same kind at the same line, and `traceback` is that of the function. The scorer
    catches it, counts it and returns `error_value`."""

    def __init__(self, kind: str, message: str, place: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.place = place or kind
        self.traceback = traceback


class RewardProcess:
    """One reward process, used by one caller at a time. `settings` is the text of `RewardChoice.settings_json`."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._prepared: set[str] = set()

    @classmethod
    async def start(cls) -> RewardProcess:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock_rollout.rewards.pool", stdin=PIPE, stdout=PIPE, start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ}, limit=MAX_ANSWER_BYTES,
        )  # fmt: skip
        return cls(process)

    async def prepare(self, settings: str) -> str:
        """Build a reward in the process, unless it was built there before. The process stays usable if this fails.
        Returns what the reward says about itself, for the log."""
        if settings in self._prepared:
            return ""
        answer = await self.ask({"settings": settings, "calls": [], "read": "result"}, PREPARE_TIMEOUT_S)
        self._prepared.add(settings)
        return str(answer["description"])

    async def end(self) -> None:
        """End the process with SIGTERM, so that it can end its programs. Sends SIGKILL after TERMINATE_S."""
        for number, limit_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, KILL_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), limit_s)
                return
        logger.error("reward process %d did not end within %g s of SIGKILL", self.process.pid, KILL_S)

    async def ask(self, request: Json, timeout_s: float) -> Json:
        """The answer of the process; the module's docstring says what the requests are. Raises RewardFailed. After a
        `timeout` or `worker_died` the process must be ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            text = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RewardFailed("exception", f"the arguments cannot be encoded as JSON: {error}") from error
        try:
            async with asyncio.timeout(timeout_s):
                self.process.stdin.write(text + b"\n")
                await self.process.stdin.drain()
                answer: Json = json.loads(await self.process.stdout.readuntil(b"\n"))
        except asyncio.LimitOverrunError as error:
            raise RewardFailed(DIED, f"the reward process answered with more than {MAX_ANSWER_BYTES} bytes") from error
        except TimeoutError as error:
            raise RewardFailed("timeout", f"took longer than {timeout_s:g} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise RewardFailed(DIED, "the reward process died; see its output in the log") from error
        if "error" in answer:
            raise _failure(answer)
        return answer


def _failure(answer: Json) -> RewardFailed:
    return RewardFailed("exception", answer["error"], answer["place"], answer["traceback"])


class RewardPool:
    """Up to `num_processes` processes, started by `fill` or on demand, and reused. Ending one affects no other."""

    def __init__(self, num_processes: int) -> None:
        self._most = num_processes
        self._num_started = 0
        """Processes that were started and not retired."""
        self._free = asyncio.Semaphore(num_processes)
        self._idle: list[RewardProcess] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._logged = {""}
        self._pace = RewardPace()

    async def prepare(self, settings: str) -> None:
        """Build a reward in one process, to check that it can be built."""
        async with self._free:
            process = await self._take()
            self._log_once(await self._guard(process, process.prepare(settings)))

    async def fill(self, rewards: Sequence[str]) -> None:
        """Start the processes that are missing, one after another, and build these rewards in each: a process takes
        longer to start than a batch of samples to generate."""
        while True:
            async with self._free:
                if self._num_started >= self._most:
                    return
                try:
                    process = await self._start()
                    for settings in rewards:
                        await self._guard(process, process.prepare(settings), keep=False)
                except (RewardFailed, OSError) as error:
                    logger.warning("a reward process is not ready before it is needed: %s", error)
                    return
                self._idle.append(process)

    async def compute_each(self, settings: str, samples: Sequence[Json], timeout_s: float) -> list[Any | RewardFailed]:
        """Compute the reward of each sample, or its failure. Samples with a fast reward go to a process together."""
        parts = self._pace.parts(settings, samples)
        computed = await asyncio.gather(*(self._compute(settings, part, timeout_s, "score") for part in parts))
        return [answer for answers in computed for answer in answers]

    async def compute(self, settings: str, arguments: Json, timeout_s: float, read: str) -> Any:
        """The result of one call, read as the module's docstring says. Raises RewardFailed."""
        (answer,) = await self._compute(settings, [arguments], timeout_s, read)
        if isinstance(answer, RewardFailed):
            raise answer
        return answer

    async def _compute(
        self, settings: str, calls: Sequence[Json], timeout_s: float, read: str
    ) -> list[Any | RewardFailed]:
        """The results or failures of one message. Its deadline starts when a process is free and the reward is built
        there. Cancelling the caller ends the process. If a process dies from a single call, another one tries once
        more. If several calls fail together, each is made again alone, so that no sample fails because of another."""
        is_alone = len(calls) == 1
        request = {"settings": settings, "calls": list(calls), "read": read}
        limit_s = timeout_s if is_alone else min(timeout_s, TOGETHER_TIMEOUT_S)
        try:
            async with self._free:
                try:
                    answer = await self._ask(request, limit_s)
                except RewardFailed as error:
                    if not is_alone or error.kind != DIED:
                        raise
                    logger.warning("%s; what it scored is scored once more by another process", error)
                    answer = await self._ask(request, limit_s)
        except RewardFailed as error:
            if is_alone:
                return [error]
            logger.info("%d samples failed together (%s); each is scored alone", len(calls), error)
            self._pace.forget(settings)
            alone = (self._compute(settings, [call], timeout_s, read) for call in calls)
            return [answer for (answer,) in await asyncio.gather(*alone)]
        self._pace.note(settings, answer["seconds"], len(calls))
        return [_failure(one) if "error" in one else one["result"] for one in answer["answers"]]

    async def _ask(self, request: Json, timeout_s: float) -> Json:
        process = await self._take()
        self._log_once(await self._guard(process, process.prepare(request["settings"]), keep=False))
        return await self._guard(process, process.ask(request, timeout_s))

    async def close(self) -> None:
        for process in self._idle:
            self._retire(process)
        self._idle.clear()
        await asyncio.gather(*self._ending)

    def _log_once(self, description: str) -> None:
        if description not in self._logged:
            self._logged.add(description)
            logger.info("%s", description)

    async def _take(self) -> RewardProcess:
        while self._idle:
            process = self._idle.pop()
            if process.process.returncode is None:
                return process
            logger.warning("reward process %d ended while it was idle; another takes its place", process.process.pid)
            self._retire(process)
        return await self._start()

    async def _start(self) -> RewardProcess:
        self._num_started += 1
        try:
            return await RewardProcess.start()
        except BaseException:
            self._num_started -= 1
            raise

    async def _guard(self, process: RewardProcess, call: Coroutine[Any, Any, T], *, keep: bool = True) -> T:
        """Await a call to `process`. Afterwards return the process to the pool, or end it."""
        try:
            result = await call
        except RewardFailed as error:
            if error.kind == "exception":
                self._idle.append(process)
            else:
                self._retire(process)
            raise
        except BaseException:
            self._retire(process)
            raise
        if keep:
            self._idle.append(process)
        return result

    def _retire(self, process: RewardProcess) -> None:
        self._num_started -= 1
        task = asyncio.create_task(process.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


# ── in a reward process ──

NICENESS = 5
"""Gives generation priority over rewards."""
MAX_TRACEBACK_CHARS = 4000
_PR_SET_PDEATHSIG = 1


def main() -> int:
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
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
    for request in requests:
        answers.write(json.dumps(_answer(json.loads(request), functions)) + "\n")
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


_READERS: dict[str, Callable[[Any], Any]] = {
    "score": read_score,
    # A batch function returns a list with one entry per sample, or an array.
    "scores": lambda results: list(map(read_score, results.tolist() if hasattr(results, "tolist") else results)),
    "result": lambda result: result,
}


def _failed(error: Exception) -> dict[str, Any]:
    """What was raised and where, without the frames of this module. Equal failures have the same place."""
    kind = type(error).__name__
    if isinstance(error, WrongScore):
        return {"error": str(error), "traceback": "", "place": kind}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    lines += traceback.format_exception_only(error)
    place = f"{kind} {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else kind
    return {"error": f"{kind}: {error}", "traceback": "".join(lines)[-MAX_TRACEBACK_CHARS:], "place": place}


def _exit(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
