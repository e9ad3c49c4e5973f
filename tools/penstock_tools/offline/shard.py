"""The rows of a dataset that one process answers."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """The rows whose number leaves the remainder `index` when divided by `count`."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def rows(self, num_rows: int) -> range:
        return range(self.index, num_rows, self.count)

    def split(self, index: int, count: int) -> Shard:
        """One of `count` shards that together have the rows of this one."""
        return Shard(self.index + self.count * index, self.count * count)


WHOLE = Shard()


def parse_shard(text: str) -> Shard:
    """The type of an option `--shard I/N`."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N - 1, such as 0/4")
    return Shard(int(found[1]), int(found[2]))
