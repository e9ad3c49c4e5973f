"""Ranks that share experts over NCCL train as one rank does. All ranks share one GPU: each says that it is a host of
its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.expert_ranks import NUM_EXPERTS, Cases, assert_same, run_cases

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

REPLAY = {"router": {"replay": True}}
CASES: Cases = {
    "one rank": (1, {}),
    "starved, one rank": (1, REPLAY),
    "two ranks share": (2, {"expert_parallel": 2}),
    "two copies": (2, {"shard_size": 1}),
    "four ranks": (4, {}),
    "four ranks, 2 share": (4, {"expert_parallel": 2}),
    "four ranks share": (4, {"expert_parallel": 4}),
    "copies of 2 that share": (4, {"expert_parallel": 2, "shard_size": 2}),
    "starved": (4, {"expert_parallel": 4, **REPLAY}),
    "sequence-parallel": (4, {"expert_parallel": 2, "sequence_parallel": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    run_cases(root, CASES, "cuda:0")
    return root


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("one rank")])
def test_loss_gradient_norm_and_weights_are_those_of_one_rank(folder: Path, name: str) -> None:
    assert_same(folder, name, "starved, one rank" if name == "starved" else "one rank", 1e-4)


def test_a_checkpoint_loads_with_any_expert_parallel(folder: Path) -> None:
    said = json.loads((folder / "loaded.json").read_text())
    assert said == {name: [] for name, (ranks, _) in CASES.items() if ranks == 4}


@pytest.mark.parametrize("settings", [{"offload": "all"}, {"compile": True}], ids=["on the host", "compiled"])
def test_other_settings_give_what_one_rank_gives(settings: dict[str, Any], tmp_path: Path) -> None:
    # Clipping scales gradients in place, but not those on the host, of which the GPU has copies.
    whole = {"max_grad_norm": 1e9}
    cases: Cases = {"one rank": (1, whole), "shared": (4, {"expert_parallel": 2, **whole, **settings})}
    run_cases(tmp_path, cases, "cuda:0")
    assert_same(tmp_path, "shared", "one rank", 1e-3)


def test_bfloat16_gives_what_one_rank_gives(tmp_path: Path) -> None:
    """Each token takes all experts: rounding would choose others of a random model."""
    settings = {"compute_dtype": "bfloat16"}
    cases: Cases = {"one rank": (1, settings), "shared": (4, {"expert_parallel": 2, **settings})}
    run_cases(tmp_path, cases, "cuda:0", per_token=NUM_EXPERTS)
    assert_same(tmp_path, "shared", "one rank", 0.05)
