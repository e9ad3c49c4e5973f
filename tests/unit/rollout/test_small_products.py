"""Small forward passes on an ARM CPU are computed without oneDNN, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.trajectory import Sampling
from penstock_rollout.engines.engine import GenerateRequest
from penstock_rollout.engines.torch.batch import MAX_MULTIPLICATIONS, DecodeBatch, SmallProducts
from support.tiny_architectures import tiny_model


class Layers(torch.nn.Module):
    """Two products, with 4,000 multiplications per token on average."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(100, 20), torch.nn.Linear(60, 100)


@pytest.fixture(autouse=True)
def with_onednn() -> Iterator[None]:
    was_on = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True
    yield
    torch.backends.mkldnn.enabled = was_on


def is_on(products: SmallProducts, num_tokens: int) -> bool:
    with products.passing(num_tokens):
        return bool(torch.backends.mkldnn.enabled)


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_only_small_passes_go_without_onednn_on_arm(machine: str) -> None:
    products = SmallProducts(Layers(), machine)
    assert products.max_tokens == MAX_MULTIPLICATIONS // 4000
    assert not is_on(products, 1) and not is_on(products, products.max_tokens)
    assert is_on(products, products.max_tokens + 1)
    assert torch.backends.mkldnn.enabled


def test_other_machines_and_models_without_products_keep_it() -> None:
    assert is_on(SmallProducts(Layers(), "x86_64"), 1)
    empty = torch.nn.Module()
    empty.device = torch.device("cpu")  # type: ignore[assignment]
    assert is_on(SmallProducts(empty, "aarch64"), 1)


def test_the_switch_is_as_it_was_after_a_pass_that_fails() -> None:
    products = SmallProducts(Layers(), "aarch64")
    with pytest.raises(ValueError, match="in the pass"), products.passing(1):
        raise ValueError("in the pass")
    assert torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    assert not is_on(products, products.max_tokens + 1), "somebody else has turned it off"


def test_prefills_and_steps_of_a_batch_are_small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    model: Any = tiny_model("qwen2").eval()
    seen: list[bool] = []
    forward = model.forward

    def watched(*args: Any, **given: Any) -> Any:
        seen.append(bool(torch.backends.mkldnn.enabled))
        return forward(*args, **given)

    monkeypatch.setattr(model, "forward", watched)
    batch = DecodeBatch(model, frozenset(), 64, 0)
    batch.join([batch.new_row(GenerateRequest("row", (5, 6, 7), Sampling(max_tokens=3, ignore_eos=True)))], 0)
    while batch.rows:
        batch.step(0)
    assert seen == [False, False, False] and torch.backends.mkldnn.enabled
