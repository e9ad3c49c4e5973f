"""What every rank does when it starts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from penstock.config.loading import validate
from penstock_learner.roles.rank import Rank


@pytest.mark.parametrize("address", ["", "elsewhere:6380"])
def test_files_of_a_rank_on_a_joined_ray_are_private(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    before = os.umask(0o022)
    try:
        Rank(validate({"model": {"path": "model"}, "learner": {"ray_address": address}}, "test"), 0, 1)
        (tmp_path / "trace").touch()
    finally:
        os.umask(before)
    assert (tmp_path / "trace").stat().st_mode & 0o777 == (0o600 if address else 0o644)
