"""The queue's Lua scripts: loaded once, called by digest, sent whole where Redis does not know them yet."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from redis.exceptions import NoScriptError

from penstock.store.redis_errors import guarded


@dataclass(frozen=True)
class Script:
    text: str
    sha: str


@cache
def load_script(name: str) -> Script:
    """`lua/NAME.lua` after the prelude that all scripts share."""
    folder = resources.files("penstock.replay") / "lua"
    text = (folder / "prelude.lua").read_text() + (folder / f"{name}.lua").read_text()
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


async def call_script(client: Any, prefix: str, name: str, *arguments: Any) -> Any:
    """Run a script on the keys of `prefix`; what it raises is of the error tree."""
    script = load_script(name)
    try:
        return await guarded(client.evalsha(script.sha, 1, prefix, *arguments))
    except NoScriptError:
        return await guarded(client.eval(script.text, 1, prefix, *arguments))
