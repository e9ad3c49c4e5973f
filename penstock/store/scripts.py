"""Lua scripts: loaded once, called by digest, and sent whole where Redis does not know them yet.

A script's text is, in this order: the key names of penstock.store.keys, `store/lua/prelude.lua`, the prelude of its own
folder if that is another one, and the script itself. KEYS[1] is the prefix of the keys.

Scripts answer with names, not positions: a record as `{name, value, ...}`, which `read_record` reads, and a table as
`{columns, values}`, which `read_rows` reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from redis.exceptions import NoScriptError

from penstock.store.keys import lua_names
from penstock.store.redis_errors import guarded


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


@cache
def _load(package: str, name: str) -> Script:
    preludes = dict.fromkeys((STORE.package, package))
    texts = [(resources.files(folder) / "lua" / "prelude.lua").read_text() for folder in preludes]
    own = (resources.files(package) / "lua" / f"{name}.lua").read_text()
    text = "".join((lua_names(), *texts, own))
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def read_record(answer: Sequence[Any]) -> dict[str, Any]:
    """`{name, value, ...}` as a dictionary."""
    return {answer[i].decode(): answer[i + 1] for i in range(0, len(answer), 2)}


def read_rows(answer: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """`{columns, values}` as one dictionary a row; the values of all rows follow each other."""
    columns, values = [column.decode() for column in answer[0]], answer[1]
    for start in range(0, len(values), len(columns)):
        yield dict(zip(columns, values[start : start + len(columns)], strict=True))
