"""Lua scripts: they are loaded once, called by digest, and sent whole if Redis does not know them yet.

A script's text is, in this order: the key names of penstock.store.keys, `store/lua/prelude.lua`, the preludes
(`prelude*.lua`) of its own folder if that is another one, and the script itself. KEYS[1] is the prefix of the keys.
Functions of the preludes that the script does not use, comments and indents are omitted: Redis makes every function
again in each call, and reads the whole text whenever it is sent.

Scripts answer with names, not positions: a record as `{name, value, ...}`, which `read_record` reads, and a table as
`{columns, values}`, which `read_rows` and `read_columns` read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from redis.exceptions import NoScriptError

from penstock.store.keys import RunKeys, lua_names
from penstock.store.redis_client import guarded


@dataclass(frozen=True)
class Script:
    text: str
    sha: str


@dataclass(frozen=True)
class ScriptFolder:
    """The folder `lua` of a package."""

    package: str

    def load(self, name: str) -> Script:
        return _load(self.package, name)

    async def call(self, client: Any, prefix: str, name: str, *arguments: Any) -> Any:
        """Run a script on the keys of `prefix`. Errors of Redis are translated to those of `penstock.errors`."""
        script = self.load(name)
        try:
            return await guarded(client.evalsha(script.sha, 1, prefix, *arguments))
        except NoScriptError:
            return await guarded(client.eval(script.text, 1, prefix, *arguments))


STORE = ScriptFolder("penstock.store")
QUEUE = ScriptFolder("penstock.replay")
SESSIONS = ScriptFolder("penstock.sessions")


class RunRecords:
    """Some records of one run in Redis. A subclass says which."""

    scripts = STORE

    def __init__(self, client: Any, run: str) -> None:
        self.client = client
        self.run = run
        self.keys = RunKeys(run)

    async def call(self, name: str, *arguments: Any) -> Any:
        """Run a script on the run's keys."""
        return await self.scripts.call(self.client, self.keys.prefix, name, *arguments)

    async def now_ms(self) -> int:
        """Redis' own clock, so that no two clocks are ever compared."""
        seconds, microseconds = await guarded(self.client.time())
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def hash_of(self, key: str) -> dict[str, bytes]:
        """All fields of a hash, sorted by name."""
        return {name.decode(): value for name, value in sorted((await guarded(self.client.hgetall(key))).items())}

    async def number_of(self, key: str, field: str | int) -> int | None:
        """A number in a hash; None if it is not there."""
        value = await guarded(self.client.hget(key, field))
        return int(value) if value else None


@cache
def _load(package: str, name: str) -> Script:
    folders = [resources.files(folder) / "lua" for folder in dict.fromkeys((STORE.package, package))]
    entries = [entry for lua in folders for entry in sorted(lua.iterdir(), key=lambda entry: entry.name)]
    prelude = "".join(entry.read_text() for entry in entries if entry.name.startswith("prelude"))
    own = (resources.files(package) / "lua" / f"{name}.lua").read_text()
    body = _without_unused(_without_comments(prelude), _without_comments(own))
    text = lua_names(body) + re.sub(r"^ +", "", body, flags=re.MULTILINE)
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end\n", re.MULTILINE | re.DOTALL)
"""A function of a prelude. It begins and ends in the first column; nothing within it does."""


def _without_comments(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not re.match(r"\s*(--|$)", line))


def _without_unused(prelude: str, own: str) -> str:
    """Both texts, without the functions of the prelude that nothing after them names. Lua's local functions are used
    only after they were defined, so one pass from the end finds them all. A function that only one other function of
    the prelude names moves into it, so that it is made only when that one is called."""
    parts, end = [own], len(prelude)
    for function in reversed(list(_FUNCTION.finditer(prelude))):
        parts.insert(0, prelude[function.end() : end])
        users = [i for i, part in enumerate(parts) if re.search(rf"\b{function[1]}\b", part)]
        if len(users) == 1 and parts[users[0]] is not own and _FUNCTION.fullmatch(parts[users[0]]):
            start = parts[users[0]].index("\n") + 1
            parts[users[0]] = parts[users[0]][:start] + function[0] + parts[users[0]][start:]
        elif users:
            parts.insert(0, function[0])
        end = function.start()
    return prelude[:end] + "".join(parts)


def read_record(answer: Sequence[Any]) -> dict[str, Any]:
    """Read `{name, value, ...}` as a dictionary."""
    return {answer[i].decode(): answer[i + 1] for i in range(0, len(answer), 2)}


def read_columns(answer: Sequence[Any]) -> dict[str, list[Any]]:
    """Read `{columns, values}` as one list per column. The values of all rows follow each other."""
    columns, values = answer
    return {column.decode(): values[i :: len(columns)] for i, column in enumerate(columns)}


def read_rows(answer: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Read `{columns, values}` as one dictionary per row."""
    columns = read_columns(answer)
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))
