"""Our AdamW against torch's: the same steps, the same state, clipping and skipping."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from penstock.config.learner import LearnerConfig
from penstock_learner.optim import optimizer as optimizers
from penstock_learner.optim.optimizer import HostAdamW, ScaledAdamW, apply_gradients, local_shard, make_optimizer
from penstock_tools.sizing import memory

OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(params=[1, 10, math.inf], ids=["all large", "some large", "none large"])
def large(request: pytest.FixtureRequest) -> float:
    """The number of elements from which a weight gets a kernel of its own."""
    size: float = request.param
    return size


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False), nn.Linear(3, 1)).to(dtype)


def set_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    """Gradients for all but the last layer."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in [*model.parameters()][:3]:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype)


def scaled_adamw(model: nn.Module, large: float) -> ScaledAdamW:
    return ScaledAdamW(list(model.parameters()), large=large, **OPTIONS)


def weights(model: nn.Module) -> list[Tensor]:
    return [local_shard(parameter).detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_steps_are_those_of_torch_with_scaled_gradients(dtype: torch.dtype, tolerance: float, large: float) -> None:
    ours, theirs = make_model(dtype), make_model(dtype)
    optimizer, other = scaled_adamw(ours, large), torch.optim.AdamW(theirs.parameters(), **OPTIONS)
    for step, scale in enumerate([1.0, 0.25, 0.003, 1.0, 0.5]):
        set_gradients(ours, step)
        set_gradients(theirs, step, scale)
        optimizer.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.01 / (step + 1)
        optimizer.step_scaled(torch.tensor(scale))
        other.step()
    for mine, its in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_scale_that_is_not_finite_changes_nothing(bad: float, large: float) -> None:
    model = make_model()
    optimizer = scaled_adamw(model, large)
    set_gradients(model, 1)
    optimizer.step_scaled(torch.tensor(0.5))
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    set_gradients(model, 2)
    optimizer.step_scaled(torch.tensor(bad))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    for index, entries in optimizer.state_dict()["state"].items():
        assert all(torch.equal(entries[name], state["state"][index][name]) for name in entries)


def test_each_loads_the_checkpoints_of_the_other(large: float) -> None:
    ours, theirs = make_model(), make_model()
    optimizer, other = scaled_adamw(ours, large), torch.optim.AdamW(theirs.parameters(), **OPTIONS)
    for model, each in ((ours, optimizer), (theirs, other)):
        set_gradients(model, 1)
        each.step()
    mine, its = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(other.state_dict())
    assert {index: set(entries) for index, entries in mine["state"].items()} == {
        index: set(entries) for index, entries in its["state"].items()
    }
    optimizer.load_state_dict(its)
    other.load_state_dict(mine)
    for model, each in ((ours, optimizer), (theirs, other)):
        set_gradients(model, 2)
        each.step()
    for mine_after, its_after in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(mine_after, its_after, rtol=1e-6, atol=1e-6)


def test_moments_on_the_host_give_the_same_steps_bucket_by_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 16 weights: one layer is cut into three, and two small ones share a bucket."""
    moved: list[list[int]] = []
    step_together = optimizers._step_together

    def recorded(weights: Any, *arguments: Any) -> None:
        moved[-1].append(sum(weight.value.numel() for weight in weights))
        step_together(weights, *arguments)

    assert memory.BUCKET == optimizers.BUCKET, "which the plan counts"
    ours, theirs = make_model(), make_model()
    on_host, other = HostAdamW([*ours.parameters()], **OPTIONS), scaled_adamw(theirs, math.inf)
    monkeypatch.setattr(optimizers, "BUCKET", 16)
    for step, scale in enumerate([1.0, 0.25, torch.nan, 0.5]):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        moved.append([])
        with monkeypatch.context() as patched:
            patched.setattr(optimizers, "_step_together", recorded)
            on_host.step_scaled(torch.tensor(scale))
        other.step_scaled(torch.tensor(scale))
        assert moved[-1] == [16, 16, 8, 15], "35 weights, 5 and 15"
        for mine, its in zip(weights(ours), weights(theirs), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)


def test_moments_on_the_host_load_those_of_the_device_and_stay_where_they_are() -> None:
    ours, theirs = make_model(), make_model()
    on_host, other = HostAdamW([*ours.parameters()], **OPTIONS), scaled_adamw(theirs, math.inf)
    for model, each in ((ours, on_host), (theirs, other)):
        set_gradients(model, 1)
        each.step()
    kept = {parameter: state["exp_avg"] for parameter, state in on_host.state.items()}
    set_gradients(theirs, 2)
    other.step()
    other.param_groups[0]["lr"] = 0.5
    on_host.load_state_dict(copy.deepcopy(other.state_dict()))
    assert on_host.param_groups[0]["lr"] == 0.5
    mine, its = on_host.state_dict()["state"], other.state_dict()["state"]
    assert mine.keys() == its.keys() and len(mine) == 3
    for index, entries in mine.items():
        assert all(torch.equal(entries[name], its[index][name]) for name in entries)
    assert all(on_host.state[parameter]["exp_avg"] is moment for parameter, moment in kept.items())
    fresh = HostAdamW([*make_model().parameters()], **OPTIONS)
    fresh.load_state_dict(on_host.state_dict())
    assert all(
        torch.equal(fresh.state_dict()["state"][index]["exp_avg_sq"], mine[index]["exp_avg_sq"]) for index in mine
    )


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(
    ("loss", "gradient_scale", "skipped"),
    [(1.0, 0.01, False), (1.0, 10.0, False), (1.0, torch.inf, True), (torch.nan, 1.0, True)],
)
@pytest.mark.usefixtures("process_group")
def test_a_step_clips_as_torch_does_and_skips_what_is_not_finite(
    is_sharded: bool, loss: float, gradient_scale: float, skipped: bool, large: float
) -> None:
    ours, theirs = make_model(), make_model()
    if is_sharded:
        fully_shard(ours)
    optimizer, before = scaled_adamw(ours, large), weights(ours)
    for model in (ours, theirs):
        model(torch.ones(2, 7) * gradient_scale).sum().backward()
    learner, losses = LearnerConfig(max_grad_norm=1.0), torch.tensor([0.0, loss])
    taken = apply_gradients(ours, optimizer, learner, 1, lr=0.01, losses=losses)
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    assert taken.skipped == skipped
    assert taken.grad_norm == pytest.approx(float(norm), nan_ok=True)
    if not skipped:
        torch.optim.AdamW(theirs.parameters(), **OPTIONS).step()
    for mine, its, old in zip(weights(ours), weights(theirs), before, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)
        assert torch.equal(mine, old) == skipped


@pytest.mark.usefixtures("process_group")
def test_a_held_step_changes_neither_weights_nor_state() -> None:
    model = make_model()
    learner = LearnerConfig()
    optimizer, before = make_optimizer(model, learner, 0.01), weights(model)
    set_gradients(model, 1)
    taken = apply_gradients(model, optimizer, learner, 1, lr=0.01, losses=torch.zeros(1), hold=True)
    assert not taken.skipped and taken.grad_norm > 0
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    assert not optimizer.state
