"""How a call to a role is split over its ranks, and how their results are joined.

A method of a worker declares both:

    class TeacherWorker(Rank):
        @dispatched(split="sequences", join="tokens")
        def log_probs(self, part: RankShard) -> NDArray[np.float32]: ...

A step then calls `await roles.teacher.log_probs(batch)`. Each rank gets its part of the batch, and the step gets one
array in the order of the batch's tokens. This file imports nothing of the models, because the controller reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Split = Literal["sequences", "copies"]
Join = Literal["tokens", "sequences", "reports", "ranks"]
JOINS: dict[Split, tuple[Join, ...]] = {"sequences": ("tokens", "sequences", "reports"), "copies": ("ranks",)}
"""The joins that go with each split."""
_ATTRIBUTE = "__penstock_dispatch__"
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


@dataclass(frozen=True)
class Dispatch:
    """The declaration of one method."""

    split: Split
    """`sequences`: the first argument is a batch, and each rank gets a RankShard with its sequences instead.
    `copies`: every rank gets the same arguments."""
    join: Join
    """`tokens`: a rank returns one number per response token of its micro-batches, and the caller gets [T] numbers in
    the batch's order. `sequences`: the same with one number per sequence. `reports`: a rank takes an optimizer step
    and returns its report; the caller gets an `Update`. `ranks`: the caller gets the list of all ranks' results."""


def dispatched(*, split: Split = "sequences", join: Join = "tokens") -> Callable[[MethodT], MethodT]:
    """Declare that steps may call this method of a worker, and how its batch is split and its results are joined."""
    if join not in JOINS.get(split, ()):
        raise ValueError(f"split {split!r} cannot be joined by {join!r}; choose {' or '.join(JOINS.get(split, ()))}")

    def declare(method: MethodT) -> MethodT:
        setattr(method, _ATTRIBUTE, Dispatch(split, join))
        return method

    return declare


def declarations(worker: type) -> dict[str, Dispatch]:
    """The declared methods of a worker class, by name. A method that overrides a declared one keeps its declaration,
    unless it has one of its own."""
    found: dict[str, Dispatch] = {}
    for base in reversed(worker.__mro__):
        for name, member in vars(base).items():
            if (own := getattr(member, _ATTRIBUTE, None)) is not None:
                found[name] = own
    return found
