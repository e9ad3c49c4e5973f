"""What every rank does when it starts."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from penstock.config.loading import validate
from penstock_learner.roles.rank import Rank, keep_gloo_on


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


def test_gloo_listens_where_other_nodes_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)
    found = {"lo": [SimpleNamespace(address="127.0.1.1")], "eth1": [SimpleNamespace(address="10.0.0.7")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    keep_gloo_on("10.9.9.9")
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "no interface has the address"
    keep_gloo_on("10.0.0.7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    keep_gloo_on("127.0.1.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1", "what the environment says counts"
