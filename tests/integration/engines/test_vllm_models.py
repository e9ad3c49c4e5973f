"""Tests that copies load vLLM's own models as its loader does. The models are in a process of their own, a fork of one
that has imported vLLM."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
from pathlib import Path

import pytest

from support.tiny_architectures import tiny_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]
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
TIMEOUT_S = 120
"""For each model. vLLM looks at every architecture in another process first."""


def reported_of(kinds: list[str], folder: Path) -> dict[str, str]:
    """What support/vllm_models.py says of tiny models of these kinds."""
    from support.vllm_models import report  # it imports vLLM, which takes seconds

    folders, output = [folder / kind for kind in kinds], folder / "report.jsonl"
    for kind, path in zip(kinds, folders, strict=True):
        tiny_model(kind).save_pretrained(path)
    process = multiprocessing.get_context("fork").Process(target=report, args=(folders, output))
    process.start()
    try:
        process.join(TIMEOUT_S * (1 + len(kinds)))
        assert process.exitcode == 0, f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return dict(json.loads(line) for line in output.read_text().splitlines())


@pytest.mark.parametrize("kinds", [FEW, pytest.param(MORE, marks=pytest.mark.long)], ids=["few", "more"])
def test_copies_load_what_vllms_loader_loads(kinds: list[str], tmp_path: Path) -> None:
    assert reported_of(kinds, tmp_path) == dict.fromkeys(kinds, "equal")


@pytest.mark.long
def test_models_that_compute_something_from_their_weights_are_refused(tmp_path: Path) -> None:
    for kind, said in reported_of(REFUSED, tmp_path).items():
        assert said.startswith("refused: "), (kind, said)
