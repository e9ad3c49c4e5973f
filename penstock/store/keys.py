"""Every key that Penstock writes to Redis, by name.

All keys of a run begin with `penstock:{run}:`. The braces are a hash tag, which keeps a run on one shard of a cluster.

    keys = RunKeys("demo")
    keys.counters                      penstock:{demo}:counters
    keys.group(7, 1)                   penstock:{demo}:group:7:1

Lua scripts get the prefix as KEYS[1] and read the same names from `lua_names()`: COUNTERS, GROUP and so on. The users
in deploy/redis/users.acl may touch only keys that are listed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from penstock.errors import InvalidInput

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._@-]{0,126}[A-Za-z0-9._-])?")


def check_name(field: str, name: str) -> None:
    """Refuse a name that cannot be part of a key or of a hash's field. Their parts are joined by colons and spaces,
    which no name has, so different names never make the same key."""
    if not NAME.fullmatch(name):
        form = "must be 1 to 128 letters, digits or . _ @ -, start with a letter or digit, and not end with @"
        raise InvalidInput(field, form)


class Key:
    """One key of a run; its name is the attribute's name."""

    def __init__(self, contents: str) -> None:
        self.contents = contents

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, keys: Any, owner: type) -> str:
        return f"{keys.prefix}{self.name}"


class KeyFamily(Key):
    """Keys that have more parts after the name: `keys.group(7, 1)` is `PREFIXgroup:7:1`."""

    def __get__(self, keys: Any, owner: type) -> Callable[..., str]:  # type: ignore[override]
        start = f"{keys.prefix}{self.name}:"
        return lambda *parts: start + ":".join(map(str, parts))


class RunKeys:
    """The keys of one run."""

    def __init__(self, run: str) -> None:
        self.prefix = f"penstock:{{{run}}}:"

    # ── run ──
    counters = Key("Hash of numbers: the queue's counts, step, term, policy_version, ids, operators' orders.")
    heartbeats = Key("Hash: part of the run to the time of its last heartbeat, in ms.")
    starts = Key("Hash: part of the run to how often it was started.")
    leaving = Key(
        "Sorted set of processes that are stopping and still need Redis, by the time of their last sign in ms."
    )
    phases = Key("Hash: part of the run to the phases of its start (penstock.store.heartbeats).")
    drained = Key("Set of servers that lease nothing.")
    pause_reason = Key("Why the run paused itself; missing if an operator paused it.")
    notices = Key("Hash: kind and fingerprint of an event to its encoded notice (penstock.store.notices).")

    # ── prompts ──
    prompts = Key("Hash: prompt id to the encoded prompt, until it is trained or dead-lettered.")
    priorities = Key("Hash: prompt id to its priority, where that is not 0.")
    attempts = Key("Hash: prompt id to how often it was leased.")
    failures = Key("Hash: prompt id to how many leases failed.")
    breakers = Key("Hash: server that failed since its last success to the record of its breaker.")
    refunds = Key(
        "Hash: prompt id to how many opened breakers refunded its failures, and the accepted groups at the last one."
    )
    pending = Key("Sorted set of prompts that can be leased, by priority and age.")
    leases = Key("Sorted set of leased prompts, by the time the lease runs out.")
    owners = Key("Hash: leased prompt to `server/attempt`.")
    returned = Key("Set of prompts whose lease ended without a group; they are in `pending` too.")
    open = Key("Sorted set of prompts in flight (leased or returned), by the number of their admission.")
    lease_signals = Key(
        "Stream of one entry, which is replaced whenever there are new prompts or there is room to admit some."
    )
    submitted = Key("Sorted set of `time:first id` of the latest submissions, by first id.")
    feeds = Key("Hash: dataset to the number of its next prompt, and `dataset:fingerprint`, `:prompts` and `:owner`.")
    idempotency = KeyFamily(
        "Hash of a client's key: `of:OWNER` to first id, number and digest of its prompts; expires."
    )
    imported = KeyFamily("Hash: row of an imported recording to its prompt; expires.")
    cancelled = Key("Bitmap of prompts that were cancelled.")
    results = Key("Stream of finished prompts: see penstock.replay.results.")

    # ── saved tokens ──
    saved = KeyFamily(
        "Hash of a prompt in flight: `sample:start` to `sample:start:` and encoded tokens of that sample, and "
        "`from:SERVER` to nothing for each server that saved some."
    )
    saved_bytes = Key("Hash: prompt with saved tokens to their bytes.")

    # ── groups ──
    group = KeyFamily("The encoded group of a prompt id and an attempt.")
    meta = Key("Hash: prompt of a queued group to `attempt bytes admission min_version appended_ms`.")
    ready = Key("Sorted set of groups that can be taken, by the number of their admission.")
    ready_by_version = Key(
        "Sorted set of the same groups, by their oldest policy version. It may lack groups that were appended while "
        "groups were not taken by version; scripts that read it complete it."
    )
    delivered = Key("Set of groups that were taken and are not committed.")
    manifests = Key("Hash: step to the ids of the groups in its batch.")
    trained = Key("Bitmap of prompts that a durable checkpoint covers.")
    kept_prompts = Key(
        "Hash: step of a commit to its prompts (id, attempt, priority and encoded prompt, as MessagePack), while a "
        "checkpoint from before that step exists."
    )
    dead = Key("Stream of dead letters.")
    dead_lettered = Key("Bitmap of prompts that were dead-lettered.")
    dead_reasons = Key("Hash: reason to the number of dead letters.")
    expired_reasons = Key("Hash: reason to the number of groups that were expired or discarded.")
    recomputed = KeyFamily("The learner's own log-probs of a group's tokens; expires.")

    # ── evaluations ──
    evaluation = KeyFamily("Hash of one evaluation: its counts, rewards and versions.")
    evaluation_groups = KeyFamily(
        "Hash of one evaluation: held-out prompt to its encoded group, which the learner reads, and `prompt:ID` to the "
        "encoded prompt; expires."
    )
    eval_pending = Key("Sorted set of held-out prompts that can be leased, by id.")
    eval_leases = Key("Sorted set of leased held-out prompts, by the time the lease runs out.")
    eval_of = Key("Hash: held-out prompt to its evaluation.")
    scores = Key("Hash: benchmark to the newest score.")
    score_history = Key("Hash: finished evaluation whose id ends in a number to its score.")

    # ── policies and servers ──
    policies = Key("Hash: version to its encoded record.")
    policy_versions = Key("Sorted set of published versions.")
    policy_pins = Key("Hash: name of an API key, session, evaluation or server to the version it is pinned to.")
    snapshots = Key("Hash: version to the folder of its snapshot, for the snapshots that exist.")
    retired_versions = Key("Set of retired versions.")
    servers = Key("Hash: server to its record.")
    server_states = Key("Hash: server to its state.")
    quarantined = Key("Hash: server whose log-probs disagree with the learner's to the record of its quarantine.")

    # ── sessions ──
    session = KeyFamily(
        "With `calls` as a second part: list of a session's calls. With `state`: hash of its owner, the place of a "
        "task that it was leased with, its reward and the answer to it. Both expire."
    )
    sessions = Key("Sorted set of sessions that have calls, by the time at which they expire.")
    session_sizes = Key("Hash: session to the bytes of its calls. `session_bytes` in `counters` is their sum.")
    finishing = Key(
        "Sorted set of rewarded sessions and tasks that are not yet groups in the queue, by the time of the next try."
    )
    task = KeyFamily(
        "Hash of one task: what it asks for, its counts, and its places by number. Expires once it has ended."
    )
    task_idempotency = KeyFamily("JSON of the digest and the ids of the tasks of an owner and its key; expires.")
    task_pending = Key("Sorted set of places of tasks that can be leased (`ID NUMBER`), by owner, then by submission.")
    task_leases = Key("Sorted set of leased places of tasks, by the time the lease runs out.")
    task_open = Key("Set of tasks of which a place was leased, until they are complete.")
    task_due = Key("Sorted set of open tasks that have a deadline, by its time.")


def key_names() -> Iterator[tuple[str, bool]]:
    """Name of each key of a run, and whether it is a family."""
    for name, value in vars(RunKeys).items():
        if isinstance(value, Key):
            yield name, isinstance(value, KeyFamily)


def lua_names(script: str) -> str:
    """Lua constants for the keys that a script uses: `local COUNTERS = PREFIX .. 'counters'`. A family ends in `:`."""
    used = set(re.findall(r"\b[A-Z_]+\b", script))
    lines = [
        f"local {name.upper()} = PREFIX .. '{name}{':' * is_family}'"
        for name, is_family in key_names()
        if name.upper() in used
    ]
    return "\n".join(["local PREFIX = KEYS[1]", *lines, ""])
