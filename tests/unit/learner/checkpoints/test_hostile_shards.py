"""A checkpoint from a store that someone else can write to: nothing in it is executed."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from penstock_learner.shards import load_shards

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def trained_state() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "rng": torch.get_rng_state()}


def test_shards_are_read_as_they_were_written(tmp_path: Path) -> None:
    written, state = trained_state(), trained_state()
    save(written, checkpoint_id=tmp_path, no_dist=True)
    load_shards(state, tmp_path, no_dist=True)
    assert torch.equal(state["model"]["weight"], written["model"]["weight"])
    assert torch.equal(state["rng"], written["rng"])
    assert state["optimizer"]["param_groups"] == written["optimizer"]["param_groups"]


@pytest.mark.parametrize("where", ["index", "value"])
def test_code_in_a_checkpoint_is_refused(tmp_path: Path, where: str) -> None:
    folder, touched = tmp_path / "shards", tmp_path / "touched"
    state = trained_state()
    if where == "value":
        state["optimizer"]["param_groups"][0]["lr"] = Touch(touched)
    save(state, checkpoint_id=folder, no_dist=True)
    if where == "index":
        (folder / ".metadata").write_bytes(pickle.dumps(Touch(touched)))
    with pytest.raises((CheckpointException, RuntimeError, pickle.UnpicklingError)):
        load_shards(trained_state(), folder, no_dist=True)
    assert not touched.exists()


def test_the_stand_in_would_run_if_it_were_unpickled(tmp_path: Path) -> None:
    pickle.load(io.BytesIO(pickle.dumps(Touch(tmp_path / "touched"))))
    assert (tmp_path / "touched").exists()
