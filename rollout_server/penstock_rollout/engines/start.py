"""Starting the engine of a process."""

from __future__ import annotations

import asyncio
import gc

from penstock.errors import Unavailable
from penstock_rollout.engines.engine import Engine


async def start_engine(engine: Engine, timeout_s: float) -> None:
    """Load the model folder as version 0, within the deadline, and set aside what the process holds by then.

    What an engine imports and builds stays. Every full garbage collection would look at all of it, and no token is
    taken from the engine and no request given to it meanwhile; frozen objects are left alone."""
    try:
        await asyncio.wait_for(engine.start(policy_version=0), timeout_s)
    except TimeoutError as error:
        raise Unavailable(
            f"the {engine.name} engine was not ready after {timeout_s:.0f} s; raise rollout.start_timeout_s"
        ) from error
    gc.collect()
    gc.freeze()
