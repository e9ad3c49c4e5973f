"""The packed model gives the same results as plain Hugging Face, which runs one sequence at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.errors import ConfigError
from penstock_learner.batches.sequence_batch import SequenceBatch, batch_of
from penstock_learner.model.architectures import path_of
from penstock_learner.model.attention import packed_attention
from penstock_learner.model.attention.packed_layout import ModelInputs
from penstock_learner.model.causal_lm import CausalLM, load_model
from support.groups import make_group
from support.tiny_models import make_tiny_qwen2

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2(tmp_path_factory.mktemp("model"), seed=3)


def some_batch() -> SequenceBatch:
    """Twelve sequences. Their tokens have different temperatures, as in a session whose calls differ."""
    batch = batch_of([make_group(prompt_id) for prompt_id in (1, 2, 3)])
    return replace(batch, temperatures=np.where(np.arange(len(batch.loss_mask)) % 3, 0.7, 1.0).astype(np.float32))


def log_probs(model: CausalLM, batch: SequenceBatch) -> torch.Tensor:
    return model(ModelInputs.of(batch, CPU))[0]


def test_packed_log_probs_and_entropy_equal_separate_forwards(folder: Path) -> None:
    batch = some_batch()
    model = load_model(folder, torch.float32, chunk_tokens=7)
    packed, entropy = model(ModelInputs.of(batch, CPU))
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    expected, expected_entropy = [], []
    starts = np.cumsum(batch.lengths) - batch.lengths
    temperatures = torch.as_tensor(batch.temperatures).split(batch.response_lengths.tolist())
    for start, length, prompt, temperature in zip(
        starts, batch.lengths, batch.prompt_lengths, temperatures, strict=True
    ):
        ids = torch.as_tensor(batch.token_ids[start : start + length])
        logits = plain(ids.unsqueeze(0)).logits[0, prompt - 1 : -1] / temperature.unsqueeze(1)
        table = logits.log_softmax(-1)
        expected.append(table.gather(1, ids[prompt:].unsqueeze(1)).squeeze(1))
        expected_entropy.append(torch.distributions.Categorical(logits=logits).entropy())
    torch.testing.assert_close(packed, torch.cat(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, torch.cat(expected_entropy), atol=1e-5, rtol=1e-5)


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_loss_and_gradient_are_those_of_a_padded_batch_however_padded(folder: Path) -> None:
    """Compares packing with plain Hugging Face over a right-padded block with an attention mask."""
    model = load_model(folder, torch.float32, chunk_tokens=16)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    batch = some_batch()
    weights = torch.linspace(-1, 1, len(batch.loss_mask)) / len(batch.loss_mask)

    @settings(max_examples=10, deadline=None)
    @given(order=st.permutations(range(batch.num_sequences)), num_padding=st.integers(0, 9), fill=st.integers(0, 63))
    def check(order: list[int], num_padding: int, fill: int) -> None:
        part = batch.select(order)
        for one in (model, plain):
            one.zero_grad()
        packed = (log_probs(model, part) * weights).sum()
        packed.backward()
        padded = (padded_log_probs(plain, part, num_padding, fill) * weights).sum()
        padded.backward()
        torch.testing.assert_close(packed, padded, atol=1e-5, rtol=0)
        torch.testing.assert_close(gradient(model), gradient(plain), atol=1e-5, rtol=1e-4)

    check()


def padded_log_probs(plain: Any, batch: SequenceBatch, num_padding: int, fill: int) -> torch.Tensor:
    """[T] log-probs from a block that is `num_padding` columns wider than its longest sequence."""
    parts = torch.as_tensor(batch.token_ids).split(batch.lengths.tolist())
    ids = torch.full((len(parts), int(batch.lengths.max()) + num_padding), fill)
    for row, part in enumerate(parts):
        ids[row, : len(part)] = part
    is_real = torch.arange(ids.shape[1]) < torch.as_tensor(batch.lengths).unsqueeze(1)
    trained = is_real[:, 1:] & (torch.arange(ids.shape[1] - 1) >= torch.as_tensor(batch.prompt_lengths).view(-1, 1) - 1)
    logits = plain(ids, attention_mask=is_real.long()).logits[:, :-1][trained]
    scaled = logits / torch.as_tensor(batch.temperatures).unsqueeze(1)
    return scaled.log_softmax(-1).gather(1, ids[:, 1:][trained].unsqueeze(1)).squeeze(1)


def test_sequences_of_equal_length_need_no_padded_copy(folder: Path) -> None:
    model = load_model(folder, torch.float32, chunk_tokens=16)
    batch = some_batch()
    inputs = ModelInputs.of(batch.select([0, 0, 0]), CPU)
    assert inputs.packing.is_even and not ModelInputs.of(batch, CPU).packing.is_even
    torch.testing.assert_close(model(inputs)[0], log_probs(model, batch.select([0])).repeat(3))


def test_gradients_do_not_depend_on_the_chunk(folder: Path) -> None:
    gradients = []
    for chunk_tokens in (5, 10_000):
        model = load_model(folder, torch.float32, chunk_tokens)
        log_probs(model, some_batch()).sum().backward()
        gradients.append(gradient(model))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_a_sequence_does_not_see_its_neighbours(folder: Path) -> None:
    model = load_model(folder, torch.float32, chunk_tokens=1000)
    batch = some_batch()
    alone = log_probs(model, batch.select([4]))
    together = log_probs(model, batch)[torch.as_tensor(batch.sequence_ids) == 4]
    torch.testing.assert_close(alone, together, atol=1e-5, rtol=1e-5)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a model folder"):
        load_model(tmp_path, torch.float32, 10)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch makes it while it traces an autograd function
@pytest.mark.parametrize("model_type", ["qwen2", pytest.param("gemma3_text", marks=pytest.mark.long)])
def test_all_layers_of_a_kind_share_one_compiled_program(model_type: str) -> None:
    """Otherwise a model with many layers compiles for minutes, and then runs uncompiled at torch's limit."""
    assert _num_programs(model_type, num_layers=6) == _num_programs(model_type, num_layers=4)


def _num_programs(model_type: str, num_layers: int) -> int:
    """How many programs torch makes of the layers for a forward pass. Every second layer has a sliding window."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    config = AutoConfig.for_model(
        model_type, vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=4, use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"] * (num_layers // 2),
    )  # fmt: skip
    packed_attention.register()
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=packed_attention.NAME)
    model = CausalLM(lm, 64, path_of(config))
    torch._dynamo.reset()
    for layer in lm.model.layers:
        layer.forward = torch.compile(layer.forward, backend=keep)
    with torch.no_grad():
        log_probs(model, some_batch())
    return len(graphs)
