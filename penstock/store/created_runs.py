"""Runs that were created through a gateway: kept in Redis until a launcher starts them, and afterwards.

    CREATED ──(launcher: has room)──► STARTED ──(launcher: its processes ended)──► FINISHED | FAILED
       ▲  └────────(stop)───────┐        └──(stop)──► STOPPING ──(launcher: ended)──┐
       │                        ▼                                                   │
       └──(resume, FAILED too)─ STOPPED ◄───────────────────────────────────────────┘

A run stays with the launcher that took it, whose disk has its checkpoints. A record is written only over the one that
its writer has read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import redis.asyncio as redis

from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.errors import Conflict
from penstock.store.redis_errors import guarded

KEY = "penstock:{_runs}:created"
"""No run can have the name in braces."""
OWN_SECTIONS = frozenset({"redis", "gateway", "launcher", "run_dir"})
"""Where a run is, which is for those to say that run it: never stored, so that no password is either."""
WAITS = "waits for a launcher that has room; `penstock launcher` starts one"
CLUSTER_KEY_FILE = "cluster.key"
"""In a run's folder, where its config names no other."""
ENDING = "its learner ends its step and writes a checkpoint"

_REPLACE = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= (ARGV[2] ~= '' and ARGV[2]) then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""

CreatedState = Literal["CREATED", "STARTED", "STOPPING", "STOPPED", "FINISHED", "FAILED"]


@dataclass(frozen=True)
class CreatedRun:
    run: str
    config: dict[str, Any]
    """What was asked for: `stored_config`."""
    state: CreatedState = "CREATED"
    launcher_id: str = ""
    detail: str = WAITS

    def config_at(self, here: RunConfig) -> RunConfig:
        """The whole config, for a process whose own is `here`. The cluster's key is the one that `here` names, else
        where `penstock up` lays it."""
        config = validate(self.config, f"run {self.run}")
        where = {name: getattr(here, name) for name in OWN_SECTIONS}
        if config.weights.cluster_key_file is None:
            key_file = here.weights.cluster_key_file or here.run_dir / self.run / CLUSTER_KEY_FILE
            where["weights"] = config.weights.model_copy(update={"cluster_key_file": key_file})
        return config.model_copy(update=where)


def stored_config(config: RunConfig) -> dict[str, Any]:
    """What was set in a config, as JSON, without what each process has of its own."""
    fields = config.model_dump(mode="json", exclude_unset=True, exclude=set(OWN_SECTIONS))
    return {"run": config.run, **fields}


class CreatedRuns:
    """The registry. Every change is one atomic call."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client

    async def create(self, config: RunConfig) -> CreatedRun:
        """The record, new or as it is by now. Conflict when a run of this name has another config."""
        wanted = CreatedRun(config.run, stored_config(config))
        if await self._replace(None, wanted):
            return wanted
        found = await self.get(config.run)
        if found is None or found.config != wanted.config:
            raise Conflict(f"run {config.run!r} was created with another config; choose another name")
        return found

    async def get(self, run: str) -> CreatedRun | None:
        text = await guarded(self.client.hget(KEY, run))
        return None if text is None else CreatedRun(**json.loads(text))

    async def list(self) -> list[CreatedRun]:
        """By name."""
        records = await guarded(self.client.hgetall(KEY))
        return [CreatedRun(**json.loads(text)) for _, text in sorted(records.items())]

    async def move(
        self, created: CreatedRun, state: CreatedState, *, launcher_id: str | None = None, detail: str = ""
    ) -> CreatedRun | None:
        """The record in its new state; None, and nothing is changed, when another call has changed it meanwhile."""
        launcher_id = created.launcher_id if launcher_id is None else launcher_id
        moved = replace(created, state=state, launcher_id=launcher_id, detail=detail)
        return moved if await self._replace(created, moved) else None

    async def _replace(self, before: CreatedRun | None, after: CreatedRun) -> bool:
        read = "" if before is None else _text(before)
        return bool(await guarded(self.client.eval(_REPLACE, 1, KEY, after.run, read, _text(after))))


def _text(created: CreatedRun) -> str:
    return json.dumps(asdict(created), sort_keys=True)
