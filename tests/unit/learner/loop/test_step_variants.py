"""A training step does not depend on how it is run: ranks, sequence parallelism, recomputation, shared prefixes,
offload, precision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from penstock.cli.main import main as cli
from penstock_learner.checkpoints import TRAINER_FILE, write_manifest
from penstock_learner.term import TrainerState
from support.forked_process import ForkedProcess
from support.tiny_architectures import tiny_model
from support.tiny_models import make_tiny_qwen2

RANK = "support.training_rank"
IMPORTED = ["torch._dynamo", "transformers.models.qwen2.modeling_qwen2"]
"""What a rank imports late, imported once for all of them."""
POISONED = 5
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"activation_checkpointing": 0}),
    "recomputed": (1, {"activation_checkpointing": 0.5}),
    "offloaded": (1, {"offload": "all"}),
    "moments on the host": (2, {"offload": "optimizer"}),
    "weights on the host": (2, {"offload": "weights"}),
    "one micro-batch": (1, {"micro_batch_tokens": 10_000, "logprob_chunk_tokens": 10_000}),
    "bfloat16": (1, {"compute_dtype": "bfloat16"}),
    "bfloat16 masters": (1, {"compute_dtype": "bfloat16", "master_dtype": "bfloat16"}),
    "two ranks": (2, {}),
    "staged": (2, {}),
    "loaded": (2, {}),
    "offloads": (2, {}),
    "poisoned": (2, {"micro_batch_tokens": 16}),
    "sequence-parallel": (2, {"sequence_parallel": 2}),
    "sequence-parallel bfloat16": (2, {"sequence_parallel": 2, "compute_dtype": "bfloat16"}),
    "long prompts": (1, {}),
    "shared": (1, {"micro_batch_tokens": 100}),
    "shared, recomputed": (1, {"activation_checkpointing": 0.5}),
    "shared, two ranks": (2, {"micro_batch_tokens": 40}),
    "shared, sequence-parallel": (2, {"sequence_parallel": 2}),
}
COMPILED: dict[str, tuple[int, dict[str, Any]]] = {
    "compiled": (1, {"compile": True, "activation_checkpointing": 0}),
    "compiled, shared": (1, {"compile": True, "activation_checkpointing": 0.5, "micro_batch_tokens": 100}),
    "compiled, keeping less": (1, {"compile": True, "activation_checkpointing": 0.5, "activation_memory": 0.5}),
}
OFFLOADS = ("none", "optimizer", "weights", "all")
ON_HOST = ["offloaded", "moments on the host", "weights on the host"]
EXACT = ["recomputed", *ON_HOST, "one micro-batch", "two ranks", "sequence-parallel"]
SHARED = ["shared", "shared, recomputed", "shared, two ranks", "shared, sequence-parallel"]
ROUNDED = ["bfloat16", "bfloat16 masters", "sequence-parallel bfloat16"]


@dataclass(frozen=True)
class Step:
    loss: float
    grad_norm: float
    log_probs: torch.Tensor
    gradient: torch.Tensor
    skipped: bool
    changed: bool
    """Whether the step changed the weights."""
    guilty: list[int]
    """Sequences of the micro-batches whose loss was not finite."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of every case, which real rank processes wrote."""
    root = tmp_path_factory.mktemp("steps")
    tiny_model("mixtral").save_pretrained(root / "loaded" / "mixtral")
    tiny_model("gemma2, wide head").save_pretrained(root / "loaded" / "gemma2", max_shard_size="100KB")
    write_cases(root, CASES)
    run_ranks(root, [(0, 1), (0, 2), (1, 2)])
    return root


@pytest.fixture(scope="module")
def steps(folder: Path) -> dict[str, Step]:
    return {name: read_step(folder, name) for name in CASES if name not in ("staged", "loaded", "offloads")}


def write_cases(folder: Path, cases: dict[str, tuple[int, dict[str, Any]]]) -> None:
    make_tiny_qwen2(folder / "model", seed=3)
    (folder / "cases.json").write_text(json.dumps(cases))


def run_ranks(folder: Path, ranks: list[tuple[int, int]]) -> None:
    """Run a process for each (rank, number of ranks), all at once."""
    processes = []
    try:
        for rank, num_ranks in ranks:
            arguments, output = [str(rank), str(num_ranks), str(folder)], folder / f"rank-{rank}-{num_ranks}.log"
            processes.append(ForkedProcess(RANK, arguments, output, {}, [RANK, *IMPORTED]))
        codes = [process.wait(280) for process in processes]
        assert codes == [0] * len(ranks), "\n".join(log.read_text() for log in sorted(folder.glob("rank-*.log")))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def read_step(folder: Path, name: str) -> Step:
    said = json.loads((folder / f"{name}.json").read_text())
    gradients = load_file(folder / f"{name}.safetensors")
    joined = torch.cat([gradients[parameter].flatten() for parameter in sorted(gradients)])
    log_probs = torch.tensor(said.pop("log_probs"))
    return Step(gradient=joined, log_probs=log_probs, **said)


@pytest.mark.parametrize("name", EXACT)
def test_loss_and_gradient_are_those_of_one_rank(steps: dict[str, Step], name: str) -> None:
    assert_same(steps[name], steps["one rank"])


@pytest.mark.parametrize("name", SHARED)
def test_loss_and_gradient_with_shared_prefixes_are_those_without(steps: dict[str, Step], name: str) -> None:
    assert_same(steps[name], steps["long prompts"])


@pytest.mark.long
def test_compiled_layers_give_the_same(tmp_path: Path) -> None:
    plain = {name: CASES[name] for name in ("one rank", "long prompts")}
    write_cases(tmp_path, plain | COMPILED)
    # A vLLM that was started here has turned compilation off for its child processes.
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_COMPILE_DISABLE"}
    subprocess.run([sys.executable, "-m", RANK, "0", "1", str(tmp_path)], env=environment, check=True, timeout=200)
    for name in COMPILED:
        expected = "long prompts" if "shared" in name else "one rank"
        assert_same(read_step(tmp_path, name), read_step(tmp_path, expected))


def assert_same(step: Step, expected: Step) -> None:
    assert step.loss == pytest.approx(expected.loss, abs=1e-5)
    assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    torch.testing.assert_close(step.log_probs, expected.log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(step.gradient, expected.gradient, atol=1e-5, rtol=1e-4)


def test_a_loss_that_is_not_finite_on_one_rank_leaves_the_weights_of_all(steps: dict[str, Step]) -> None:
    step = steps["poisoned"]
    assert (step.skipped, step.changed) == (True, False)
    assert POISONED in step.guilty and len(step.guilty) < 12, "the micro-batch is named, not the whole batch"
    assert (steps["two ranks"].skipped, steps["two ranks"].changed) == (False, True)


def test_a_checkpoint_is_of_the_moment_at_which_it_was_staged(folder: Path) -> None:
    said = json.loads((folder / "staged.json").read_text())
    assert said["moved"], "the weights changed while it was written"
    assert said["same"], "the checkpoint has the weights from before"


def test_a_checkpoint_loads_whatever_is_offloaded(folder: Path) -> None:
    """Each of the four writes one on two ranks, which each of the four continues with the same steps."""
    assert json.loads((folder / "offloads.json").read_text()) == {
        f"{written}, {read}": True for written in OFFLOADS for read in OFFLOADS
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_part_of_the_weights_and_nothing_else(folder: Path, rank: int) -> None:
    said = json.loads((folder / f"loaded-{rank}.json").read_text())
    assert len(said) == 6
    for case, (wrong, share_read) in said.items():
        assert not wrong, case
        assert 0.3 < share_read < 0.7, f"{case}: two ranks read half each, except for a row that cannot be halved"


def exported(folder: Path, out: Path) -> list[str]:
    """Export the checkpoint of `folder`. Returns the words of the command."""
    config = folder / "run.yaml"
    config.write_text(f"model: {{path: {folder / 'model'}}}")
    (folder / "shards" / TRAINER_FILE).write_text(json.dumps(asdict(TrainerState())))
    write_manifest(folder / "shards", {})
    words = ["export", "--config", str(config), "--checkpoint", str(folder / "shards"), "--out", str(out)]
    assert cli(words) == 0
    return words


def test_a_composite_model_is_trained_by_ranks_of_any_number_and_exported_whole(tmp_path: Path) -> None:
    model: Any = tiny_model("qwen3_5")
    model.save_pretrained(tmp_path / "model")
    two: dict[str, tuple[int, dict[str, Any]]] = {"two ranks": (2, {}), "staged": (2, {})}
    (tmp_path / "cases.json").write_text(json.dumps({"one rank": (1, {}), **two}))
    run_ranks(tmp_path, [(0, 1), (0, 2), (1, 2)])
    assert_same(read_step(tmp_path, "two ranks"), read_step(tmp_path, "one rank"))
    (tmp_path / "cases.json").write_text(json.dumps({"resumed": (1, {})}))
    run_ranks(tmp_path, [(0, 1)])
    resumed, expected = (load_file(tmp_path / f"{name}.safetensors") for name in ("resumed", "staged-after"))
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())
    exported(tmp_path, tmp_path / "out")
    whole, report = AutoModelForMultimodalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    trained, loaded, before = load_file(tmp_path / "staged.safetensors"), whole.state_dict(), model.state_dict()
    others = before.keys() - trained.keys()
    assert any("visual" in name for name in others) and not any("visual" in name for name in trained)
    assert all(torch.equal(loaded[name], weight) for name, weight in trained.items())
    assert all(torch.equal(loaded[name], before[name]) for name in others)
    assert not any(torch.equal(weight, before[name]) for name, weight in trained.items())


def test_an_exported_checkpoint_of_two_ranks_loads_in_transformers(folder: Path, tmp_path: Path) -> None:
    words = exported(folder, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = load_file(folder / "staged.safetensors")
    assert expected and all(torch.equal(loaded[name], weight) for name, weight in expected.items())
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert cli(words) == 2, "an existing folder is never written over"


@pytest.mark.parametrize("name", ROUNDED)
def test_half_precision_points_the_same_way(steps: dict[str, Step], name: str) -> None:
    expected, step = steps["one rank"], steps[name]
    cosine = torch.nn.functional.cosine_similarity(step.gradient, expected.gradient, dim=0)
    assert cosine > 0.99
    assert step.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    assert (step.log_probs - expected.log_probs).abs().mean() < 0.05
    assert not torch.equal(step.gradient, expected.gradient), "the result should differ from float32"
