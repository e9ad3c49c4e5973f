"""Free space is measured and warned about before a disk is full, and a full disk is recognized."""

from __future__ import annotations

import errno
import logging
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.errors import ProcessDied
from penstock.machine import DiskWatch, is_disk_full, measure_disk
from penstock.metrics import DiskGauges

Usage = namedtuple("Usage", "total used free")
GIB = 2**30


@pytest.mark.parametrize(
    ("size", "free", "needed", "is_low"),
    [(1000, 4, 0, True), (1000, 6, 0, False), (1000, 6, 7, True), (20, 2, 0, False), (20, 0.5, 0, True)],
)
def test_space_is_low_below_a_reserve_or_what_the_next_files_need(
    size: int, free: float, needed: int, is_low: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(size * GIB, 0, int(free * GIB)))
    assert measure_disk(tmp_path / "missing" / "folder", needed * GIB).is_low == is_low


def test_a_warning_each_time_when_space_becomes_low(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = [GIB]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000 * GIB, 0, free[0]))
    watch, registry = DiskWatch(tmp_path, "checkpoints"), CollectorRegistry()
    DiskGauges(registry).follow("run_dir", watch)
    with caplog.at_level(logging.WARNING):
        for free[0] in (GIB, GIB, 100 * GIB, GIB):
            watch.measure()
    assert [record.message for record in caplog.records] == [
        f"1 of 1e+03 GiB are free under {tmp_path}, which holds checkpoints; free space before it is full"
    ] * 2
    assert registry.get_sample_value("penstock_disk_free_bytes", {"folder": "run_dir"}) == GIB


def test_errors_of_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = RuntimeError("unexpected pos 64 vs 0")
    wrapped.__cause__ = full
    by_text = ProcessDied("policy.finish_saving failed: OSError: [Errno 28] No space left on device")
    over_quota = ProcessDied("policy.finish_saving failed: OSError: /run: [Errno 122] Disk quota exceeded: '/run/a'")
    assert all(is_disk_full(error, tmp_path) for error in (full, wrapped, by_text, over_quota))
    short_write = ProcessDied("policy.finish_saving failed: RuntimeError: unexpected pos 64 vs 0")
    assert not is_disk_full(short_write, tmp_path) and not is_disk_full(OSError(errno.EACCES, "denied"), tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(GIB, GIB, 0))
    assert is_disk_full(short_write, tmp_path)
