"""Tests that copies load vLLM's own models as its loader does. The models are in a process of their own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_architectures import tiny_model

# The import takes seconds, and only the other process needs it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")

ROOT = Path(__file__).parents[3]
FEW = ["qwen2"]
MORE = [
    "cohere",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt2",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "opt",
    "phi3",
    "qwen3",
    "starcoder2",
]
REFUSED = ["falcon_mamba", "phi"]
"""The loader of the second makes a parameter anew in every load."""
TIMEOUT_S = 60
"""For each model. vLLM looks at every architecture in another process first."""


def reported_of(kinds: list[str], folder: Path) -> dict[str, str]:
    """What support/vllm_models.py says of tiny models of these kinds."""
    folders = [folder / kind for kind in kinds]
    for kind, path in zip(kinds, folders, strict=True):
        tiny_model(kind).save_pretrained(path)
    command = [sys.executable, "-m", "support.vllm_models", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S * (1 + len(kinds)), check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert len(lines) == len(kinds), done.stderr[-3000:]
    return {Path(path).name: said for path, said in lines}


@pytest.mark.parametrize("kinds", [FEW, pytest.param(MORE, marks=pytest.mark.long)], ids=["few", "more"])
def test_copies_load_what_vllms_loader_loads(kinds: list[str], tmp_path: Path) -> None:
    assert reported_of(kinds, tmp_path) == dict.fromkeys(kinds, "equal")


@pytest.mark.long
def test_models_that_compute_something_from_their_weights_are_refused(tmp_path: Path) -> None:
    for kind, said in reported_of(REFUSED, tmp_path).items():
        assert said.startswith("refused: "), (kind, said)
