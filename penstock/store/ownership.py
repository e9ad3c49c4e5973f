"""Who may use a record: the API key that made it, the other keys of its team, and operators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Owner:
    """Owns what a call creates, and decides what it may use. Scripts get both fields, for their own `may_use`."""

    name: str
    """`@TEAM` of an API key with a team; otherwise the key's own name, which no team has."""
    sees_all: bool
    """Whether it is an operator: a key of the scope admin."""

    def may_use(self, owner: str) -> bool:
        """Whether a record of this owner may be used. What has no owner is everyone's: the run has made
        it, or a person by hand."""
        return self.sees_all or owner in ("", self.name)

    @property
    def arguments(self) -> tuple[str, int]:
        return self.name, int(self.sees_all)


RUN_ITSELF = Owner("", sees_all=True)
