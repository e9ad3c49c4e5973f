"""Moving encoded groups to and from Redis.

Payloads are plain strings, set in the same transaction as the script that appends them, and fetched with MGET. The
large bytes pass neither through Lua nor through the event loop: they go over `RedisClient.payloads`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import redis
from redis.exceptions import NoScriptError

from penstock.config.service import ReplayConfig
from penstock.replay.queue_types import AppendOutcome, FinishedGroup
from penstock.store.keys import RunKeys
from penstock.store.redis_client import QUEUE, RedisClient, RedisClusterClient, read_record

APPENDED_BYTES = 2**20
FETCHED_GROUPS = 16
"""Size of one exchange. Larger ones do not fit Redis' caches, which makes it slower, and keep other clients waiting."""
FETCHED_AHEAD_BYTES = 4 * 2**20
"""Payloads of so many bytes are fetched together with the groups' ids."""


class GroupPayloads:
    """Appends and fetches the encoded groups of one run."""

    def __init__(self, client: RedisClient, keys: RunKeys) -> None:
        self.client = client
        self.keys = keys

    async def append(self, groups: Sequence[FinishedGroup], config: ReplayConfig) -> list[AppendOutcome]:
        """Redis works on one part while the next is on its way. It is asked to run the script by its digest. If it does
        not know the script, because it was restarted, the payloads are sent again with the script. If the process is
        killed between the two, or the script fails, they are deleted when this or a later attempt fails or succeeds."""
        parts, limits = _parts(groups), (config.capacity_bytes, config.take_order)
        script = QUEUE.load("append")
        send = _append_one_by_one if isinstance(self.client, RedisClusterClient) else _append_at_once

        async def append(*call: str) -> list[AppendOutcome]:
            return await self.client.payloads.run(
                lambda client: send(client, (self._transaction(part, limits, call) for part in parts))
            )

        try:
            return await append("EVALSHA", script.sha)
        except NoScriptError:  # if Redis forgot the script after the first part, its groups now answer `duplicate`
            return await append("EVAL", script.text)

    async def take(self, *arguments: Any) -> tuple[dict[int, int], dict[int, bytes]]:
        """Run take.lua. Returns the attempts of the groups that were taken, and their payloads if these are small.

        Both are one turn of the event loop and of the thread: with small groups, turns cost more than the bytes. If the
        payloads cannot be fetched, the call fails as one whose answer was lost, and the next one takes the same."""
        script = QUEUE.load("take")

        def exchange(client: Any) -> tuple[dict[int, int], dict[int, bytes]]:
            try:
                answer = client.evalsha(script.sha, 1, self.keys.prefix, *arguments)
            except NoScriptError:
                answer = client.eval(script.text, 1, self.keys.prefix, *arguments)
            taken = read_record(answer)
            ids, attempts = (map(int, taken[name].split()) for name in ("prompt_ids", "attempts"))
            attempts_of = dict(zip(ids, attempts, strict=True))
            if taken["num_bytes"] > FETCHED_AHEAD_BYTES:
                return attempts_of, {}
            return attempts_of, self._fetched(client, self.keys_of(attempts_of))

        return await self.client.payloads.run(exchange)

    async def fetch(self, keys: dict[int, str]) -> dict[int, bytes]:
        """The payloads that exist, by prompt id; `keys` has the key of each."""
        return await self.client.payloads.run(lambda client: self._fetched(client, keys)) if keys else {}

    def keys_of(self, attempts: Mapping[int, int]) -> dict[int, str]:
        """The key of the payload of each prompt, whose attempts these are."""
        prefix = self.keys.group("")
        return {prompt_id: f"{prefix}{prompt_id}:{attempt}" for prompt_id, attempt in attempts.items()}

    def _fetched(self, client: redis.Redis, keys: dict[int, str]) -> dict[int, bytes]:
        names = list(keys.values())
        parts = [names[start : start + FETCHED_GROUPS] for start in range(0, len(names), FETCHED_GROUPS)]
        if isinstance(self.client, RedisClusterClient):
            found = [payload for part in parts for payload in cast("list[Any]", client.mget(part))]
        else:
            # Redis writes one answer while the answer before it is being read.
            pipeline = client.pipeline(transaction=False)
            for part in parts:
                pipeline.mget(part)
            found = [payload for answer in pipeline.execute() for payload in answer]
        return {prompt_id: payload for prompt_id, payload in zip(keys, found, strict=True) if payload is not None}

    def _transaction(
        self, groups: Sequence[FinishedGroup], limits: tuple[Any, ...], call: tuple[str, ...]
    ) -> list[tuple[Any, ...]]:
        """Set the payloads, then run append.lua by `call`, which names its digest or has its text."""
        ids = [str(group.lease.prompt_id) for group in groups]
        attempts = [str(group.lease.attempt) for group in groups]
        prefix = self.keys.group("")
        payloads = {
            f"{prefix}{prompt_id}:{attempt}": group.payload
            for prompt_id, attempt, group in zip(ids, attempts, groups, strict=True)
        }
        sizes, versions = [str(len(group.payload)) for group in groups], [str(group.min_version) for group in groups]
        return [
            ("MSET", *chain.from_iterable(payloads.items())),
            (*call, 1, self.keys.prefix, *limits, json.dumps([ids, attempts, sizes, versions])),
        ]


def _parts(groups: Sequence[FinishedGroup]) -> list[list[FinishedGroup]]:
    """Split into parts of about APPENDED_BYTES, in order."""
    parts: list[list[FinishedGroup]] = []
    num_bytes = APPENDED_BYTES
    for group in groups:
        if num_bytes >= APPENDED_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(group)
        num_bytes += len(group.payload)
    return parts


def _append_at_once(client: redis.Redis, transactions: Iterable[list[tuple[Any, ...]]]) -> list[AppendOutcome]:
    pipeline: Any = client.pipeline(transaction=False)
    for transaction in transactions:
        for command in (("MULTI",), *transaction, ("EXEC",)):
            pipeline.execute_command(*command)
    return [outcome for answer in pipeline.execute()[3::4] for outcome in _outcomes(answer)]


def _append_one_by_one(client: redis.Redis, transactions: Iterable[list[tuple[Any, ...]]]) -> list[AppendOutcome]:
    """Commands are sent by name, because a cluster's transaction does not have their methods."""
    outcomes: list[AppendOutcome] = []
    for transaction in transactions:
        pipeline: Any = client.pipeline(transaction=True)
        for command in transaction:
            pipeline.execute_command(*command)
        outcomes += _outcomes(pipeline.execute())
    return outcomes


def _outcomes(answer: list[Any]) -> list[AppendOutcome]:
    """Outcomes of one transaction, whose answers are those of MSET and of the script."""
    for part in answer:
        if isinstance(part, Exception):
            raise part
    names, counts = answer[1][::2], answer[1][1::2]
    return [outcome for name, count in zip(names, counts, strict=True) for outcome in [name.decode()] * count]
