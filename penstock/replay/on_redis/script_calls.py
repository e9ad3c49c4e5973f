"""What the calls of all three sides share: the client, the Lua scripts, waiting, and the bytes of queued groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.config.service import ReplayConfig
from penstock.replay.on_redis.group_payloads import GroupPayloads
from penstock.store.keys import RunKeys
from penstock.store.redis_client import RedisClient, guarded
from penstock.store.scripts import QUEUE


class ScriptCalls:
    """Calls the scripts in `lua/` for one run."""

    def __init__(self, client: RedisClient, run: str, config: ReplayConfig) -> None:
        self.client = client
        self.keys = RunKeys(run)
        self.config = config
        self.payloads = GroupPayloads(client, self.keys)
        self._seen: dict[str, bytes] = {}
        """Newest entry of each stream that a wait has seen. The next wait returns at once if there are newer ones, so
        no signal between two waits is missed."""

    async def call(self, name: str, *arguments: Any) -> Any:
        return await QUEUE.call(self.client, self.keys.prefix, name, *arguments)

    async def fetch_located(self, prompt_ids: Sequence[int]) -> dict[int, bytes]:
        """The groups of these prompts that are queued, wherever they are."""
        located = await self.call("locate", *prompt_ids)
        return await self.payloads.fetch(
            {prompt_id: key for prompt_id, key in zip(prompt_ids, located, strict=True) if key}
        )

    async def wait_for_entry(self, stream: str, timeout_s: float) -> None:
        """Block on a connection of its own until the stream has an entry that no wait has seen, or for `timeout_s`."""
        block_ms = max(1, int(1000 * min(timeout_s, self.client.max_block_s)))
        found = await guarded(self.client.xread({stream: self._seen.get(stream, b"0-0")}, count=1, block=block_ms))
        if found and stream == self.keys.lease_signals:  # it has one entry, so that is the newest
            self._seen[stream] = found[0][1][0][0]
        elif found:
            for entry_id, _ in await guarded(self.client.xrevrange(stream, count=1)):
                self._seen[stream] = entry_id
