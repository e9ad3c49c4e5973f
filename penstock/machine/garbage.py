"""Keeps Python's garbage collector from objects that are never garbage."""

from __future__ import annotations

import gc


def spare_living_objects() -> None:
    """Free what is garbage, and let the collector skip what is left. Call it when a process has loaded all that it
    keeps, and again when it has loaded anew: what an earlier call spared may be garbage by then.

    The objects that are imported and built at the start are hundreds of thousands. A full collection visits all of them
    each time, for a few tenths of a second in which the process does nothing else."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
