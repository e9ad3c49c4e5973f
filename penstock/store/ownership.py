"""Who may use a record: the API key that made it, the other keys of its team, and operators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Owner:
    """Owner of what a call creates, and judge of what it may use. RUN_ITSELF stands
    for the run's feed, learner and sweeps.

    Lua scripts that write get both fields and make the same decision: `may_use` in sessions/lua/prelude.lua."""

    name: str
    """Team of the API key, which is the key's own name if it has no team."""
    sees_all: bool
    """Whether it is an operator: a key of the scope admin."""

    def may_use(self, owner: str) -> bool:
        """Whether a record of this owner may be used. A record without an owner may be used by every key: the run made
        it, or a gateway from before records had owners."""
        return self.sees_all or owner in ("", self.name)

    @property
    def arguments(self) -> tuple[str, int]:
        """The owner as arguments of a script."""
        return self.name, int(self.sees_all)


RUN_ITSELF = Owner("", sees_all=True)
