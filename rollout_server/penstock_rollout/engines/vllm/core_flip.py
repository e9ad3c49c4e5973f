"""Flip a version inside EngineCore, in one call of the server.

Decoding would otherwise wait for a round trip between two busy processes at every stage of the flip: pause, load, set
the version, resume. The call does everything at the first moment at which no step is in flight:
- It refuses a stage that does not verify, before anything is paused.
- Every token of the old version leaves before the scheduler answers the pause (scheduler.py).
- The version is set while no step is in flight. A mark among the outputs shows where its tokens begin.
- Requests without a token begin under the new version, and share no KV with an earlier load.

If the load fails, the scheduler stays paused and the call fails.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from penstock_rollout.engines.vllm.start import CONTROL_TIMEOUT_S, LOAD_TIMEOUT_S
from penstock_rollout.engines.vllm.version_stamps import begin_version

Flipped = tuple[str, float, list[tuple[float, float]]]
"""Why the stage was refused, or an empty string; seconds of the pause; receive_s and load_s of each worker."""


def install() -> None:
    """Make `flip` a method of EngineCore that the server can call. Call this in EngineCore's process."""
    EngineCoreProc.penstock_flip = flip


def flip(
    core: Any, policy_version: int, bucket_checksums: list[str], salt: str, clear_cache: bool
) -> Flipped | Future[Flipped]:
    """Load the staged version on all workers between two steps.

    `salt` is that of requests which the server submits under the new version. The pause is counted from here: steps in
    flight are finished, and no other begins."""
    workers = core.model_executor
    mismatches = workers.collective_rpc("penstock_mismatch", CONTROL_TIMEOUT_S, (policy_version, bucket_checksums))
    if found := next(filter(None, mismatches), ""):
        return found, 0.0, []
    started = time.monotonic()

    def load() -> Flipped:
        timings = workers.collective_rpc("penstock_commit", LOAD_TIMEOUT_S)
        begin_version(core, policy_version)
        core.scheduler.begin_load(salt)
        core.resume_scheduler()
        # EngineCore is about to wait for a message, because nothing could be scheduled until now.
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        return "", time.monotonic() - started, timings

    paused = core.pause_scheduler("keep", clear_cache)
    return load() if paused is None else _then(paused, load)


def _then(paused: Future[None], load: Any) -> Future[Flipped]:
    """Call `load` when the pause is complete, in the thread that completes it."""
    flipped: Future[Flipped] = Future()

    def run(paused: Future[None]) -> None:
        try:
            paused.result()
            result = load()
        except Exception as error:  # the server gets it as the failure of its call
            flipped.set_exception(error)
        else:
            flipped.set_result(result)

    paused.add_done_callback(run)
    return flipped
