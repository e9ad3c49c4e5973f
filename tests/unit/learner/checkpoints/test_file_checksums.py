"""Every piece of a file has a checksum of its own, and damage is found in whichever piece it is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from penstock_learner import checkpoints
from penstock_learner.checkpoints import FileRecord, PieceChecksums, find_damage


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "PIECE_BYTES", 1000)
    monkeypatch.setattr(checkpoints, "READ_BYTES", 300)


@pytest.mark.parametrize("num_bytes", [0, 1, 999, 1000, 1001, 3500])
def test_a_record_does_not_depend_on_how_the_content_arrives(tmp_path: Path, num_bytes: int) -> None:
    content = random.Random(num_bytes).randbytes(num_bytes)
    (tmp_path / "file").write_bytes(content)
    arrived = PieceChecksums()
    for start in range(0, num_bytes, 170):
        arrived.add(memoryview(content)[start : start + 170])
    record = FileRecord.of(content)
    assert record == arrived.record() == FileRecord.of_file(tmp_path / "file")
    assert len(record.pieces) == -(-num_bytes // 1000)
    assert find_damage(tmp_path, {"file": record}) == []


@pytest.mark.parametrize("places", [(0,), (1500,), (2999,), (3499,), (10, 3000)])
def test_damage_is_found_in_every_piece_and_a_file_is_named_once(tmp_path: Path, places: tuple[int, ...]) -> None:
    content = bytearray(random.Random(0).randbytes(3500))
    files = {"file": FileRecord.of(bytes(content)), "other": FileRecord.of(b"whole")}
    for place in places:
        content[place] ^= 1
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "other").write_bytes(b"whole")
    [line] = find_damage(tmp_path, files)
    assert f"{tmp_path / 'file'} is damaged: expected checksum {files['file'].pieces[places[0] // 1000]}" in line
    assert line.endswith(f"from byte {places[0] // 1000 * 1000} on")
