"""Runs that were created through a gateway. Their records stay in Redis before, while and after a launcher runs them.

    CREATED ──(launcher: has room)──► STARTED ──(launcher: its processes ended)──► FINISHED | FAILED
       ▲  └────────(stop)───────┐        └──(stop)──► STOPPING ──(launcher: ended)──┐
       │                        ▼                                                   │
       └──(resume, FAILED too)─ STOPPED ◄───────────────────────────────────────────┘

A run stays with the launcher that took it, because its checkpoints are on that launcher's disk. A writer replaces a
record only if it is still the one that the writer has read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import redis.asyncio as redis

from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.errors import Conflict
from penstock.records import read_known_fields
from penstock.store.keys import CreatedRunsKeys
from penstock.store.redis_errors import guarded
from penstock.store.scripts import STORE

OWN_SECTIONS = frozenset({"redis", "gateway", "run_dir", "cache_dir"})
"""Sections that each process takes from its own config. They are never stored, so no password is stored either."""
WAITS = "waits for a launcher that has room; `penstock launcher` starts one"
ENDING = "its learner ends its step and writes a checkpoint"

CreatedState = Literal["CREATED", "STARTED", "STOPPING", "STOPPED", "FINISHED", "FAILED"]


@dataclass(frozen=True)
class CreatedRun:
    """A run's config, and how far it is."""

    run: str
    config: dict[str, Any]
    """The config that the run was created with, as `stored_config` returns it."""
    state: CreatedState = "CREATED"
    launcher_id: str = ""
    detail: str = WAITS
    stored: str = field(default="", compare=False, repr=False)
    """The record as it was read. It may have fields of a newer version, which a change keeps."""

    def config_at(self, here: RunConfig) -> RunConfig:
        """The whole config for a process whose own config is `here`. If the run names no cluster key file, it uses the
        one that `here` names."""
        config = validate(self.config, f"run {self.run}")
        where = {name: getattr(here, name) for name in OWN_SECTIONS}
        if config.weights.cluster_key_file is None:
            key_file = here.weights.cluster_key_file
            where["weights"] = config.weights.model_copy(update={"cluster_key_file": key_file})
        return config.model_copy(update=where)


def stored_config(config: RunConfig) -> dict[str, Any]:
    """The fields that were set in a config, as JSON, without OWN_SECTIONS."""
    fields = config.model_dump(mode="json", exclude_unset=True, exclude=set(OWN_SECTIONS))
    return {"run": config.run, **fields}


class CreatedRuns:
    """The registry of created runs. Every change is one atomic call."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client

    async def create(self, config: RunConfig) -> CreatedRun:
        """Create a run, or return its current record if it exists. Raises Conflict when a run of this name has another
        config."""
        wanted = CreatedRun(config.run, stored_config(config))
        if created := await self._replace("", wanted):
            return created
        found = await self.get(config.run)
        if found is None or found.config != wanted.config:
            raise Conflict(f"run {config.run!r} was created with another config; choose another name")
        return found

    async def get(self, run: str) -> CreatedRun | None:
        text = await guarded(self.client.hget(CreatedRunsKeys.created, run))
        return None if text is None else _read(text)

    async def list(self) -> list[CreatedRun]:
        """All created runs, by name."""
        records = await guarded(self.client.hgetall(CreatedRunsKeys.created))
        return [_read(text) for _, text in sorted(records.items())]

    async def move(
        self, created: CreatedRun, state: CreatedState, *, launcher_id: str | None = None, detail: str = ""
    ) -> CreatedRun | None:
        """Move a run to a state and return the new record. Returns None, and changes nothing, if another call has
        changed the record since it was read."""
        launcher_id = created.launcher_id if launcher_id is None else launcher_id
        return await self._replace(
            created.stored, replace(created, state=state, launcher_id=launcher_id, detail=detail)
        )

    async def _replace(self, before: str, after: CreatedRun) -> CreatedRun | None:
        fields = asdict(after)
        del fields["stored"]
        text = json.dumps((json.loads(before) if before else {}) | fields, sort_keys=True)
        arguments = (after.run, before, text)
        is_replaced = await STORE.call(self.client, CreatedRunsKeys.prefix, "replace_created_run", *arguments)
        return replace(after, stored=text) if is_replaced else None


def _read(text: bytes) -> CreatedRun:
    return read_known_fields(CreatedRun, json.loads(text) | {"stored": text.decode()})
