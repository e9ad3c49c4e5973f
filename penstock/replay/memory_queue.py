"""The replay queue in memory, for tests. It is also the simplest description of what the Lua scripts do.

Calls do not await anything, so each is atomic within one event loop. Several queue objects, each with its own term, may
share one `MemoryStore`, as a learner and its successor share Redis. The orders of operators are fields of the store: a
test sets `is_paused`, `drained`, `quarantined`, `pins` and `served_versions`, and `lease` follows them. The stream of
results exists only in Redis.
"""

from __future__ import annotations

from penstock.config.service import ReplayConfig
from penstock.replay.in_memory.consumer import MemoryConsumer
from penstock.replay.in_memory.intake import MemoryIntake
from penstock.replay.in_memory.producer import MemoryProducer
from penstock.replay.in_memory.store import MemoryStore


class MemoryReplayQueue(MemoryIntake, MemoryProducer, MemoryConsumer):
    """PromptIntake, GroupProducer and GroupConsumer over a store. `term` is 0 until `take_term` was called."""

    def __init__(self, store: MemoryStore, config: ReplayConfig) -> None:
        MemoryIntake.__init__(self, store, config)
        MemoryProducer.__init__(self, store, config)
        MemoryConsumer.__init__(self, store, config)
