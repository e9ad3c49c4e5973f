"""Role workers in the test's own process, with one rank and without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from penstock.config.run import RunConfig
from penstock_learner.roles.rank import Rank

RankT = TypeVar("RankT", bound=Rank)


@contextmanager
def one_rank_world() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_rank(worker: type[RankT], config: RunConfig, name: str = "") -> RankT:
    """Make a loaded rank. This needs `one_rank_world`, and a config with `learner.publish_host`."""
    rank: Any = worker(config, 0, 1, name=name)
    rank.device = torch.device("cpu")
    rank.load()
    loaded: RankT = rank
    return loaded


def with_model(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same settings for another model, ready for `make_rank`."""
    learner = config.get("learner", {}) | {"publish_host": "127.0.0.1"}
    return config | {"model": {"path": str(folder)}, "learner": learner}
