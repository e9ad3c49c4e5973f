"""An optimizer with parts of its state in pinned host memory takes the steps of one that has all on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from penstock.config.learner import LearnerConfig
from penstock_learner.model.loading import host_policy
from penstock_learner.optim import optimizer as optimizers
from penstock_learner.optim.optimizer import ScaledAdamW, local_shard, make_optimizer

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = 2048
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def one_gpu_rank() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(offload: str, *, sharded: bool) -> tuple[nn.Module, ScaledAdamW, int]:
    """A model after three steps, one of them skipped, its optimizer, and the bytes of the GPU that these hold."""
    before = torch.cuda.memory_allocated()
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 3)).cuda()
    learner = LearnerConfig.model_validate({"offload": offload, "betas": (0.9, 0.95), "weight_decay": 0.1})
    if sharded:
        fully_shard(model, offload_policy=host_policy(learner.keeps_weights_on_host, is_cuda=True))
    optimizer = make_optimizer(model, learner, 0.01)
    step(model, optimizer, 1.0, 0.5, torch.nan)
    return model, optimizer, torch.cuda.memory_allocated() - before


def step(model: nn.Module, optimizer: ScaledAdamW, *scales: float) -> None:
    for number, scale in enumerate(scales):
        torch.manual_seed(number)
        model(torch.randn(16, SIZE, device="cuda")).square().mean().backward()
        optimizer.step_scaled(torch.tensor(scale, device="cuda"))
        optimizer.zero_grad(set_to_none=True)


def state(model: nn.Module, optimizer: ScaledAdamW) -> list[torch.Tensor]:
    moments = [optimizer.state[parameter][name] for parameter in model.parameters() for name in (*MOMENTS, "step")]
    return [local_shard(tensor.detach()).cpu() for tensor in (*model.parameters(), *moments)]


@pytest.mark.usefixtures("one_gpu_rank")
@pytest.mark.parametrize(
    ("offload", "sharded", "bytes_saved"),
    [("optimizer", False, 8), ("optimizer", True, 8), ("weights", True, 4), ("all", True, 12)],
)
def test_state_in_pinned_memory_gives_the_same_steps(
    offload: str, sharded: bool, bytes_saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a checkpoint's way in and out, which leaves everything where it is. There are no gradients between
    steps: weights take 4 bytes, moments 8."""
    monkeypatch.setattr(optimizers, "BUCKET", SIZE * SIZE // 3)
    trained("none", sharded=sharded)  # a process's first product allocates the workspace of cuBLAS
    model, on_host, its_bytes = trained(offload, sharded=sharded)
    other, on_gpu, other_bytes = trained("none", sharded=sharded)
    assert all(map(torch.equal, state(model, on_host), state(other, on_gpu)))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert other_bytes - its_bytes == pytest.approx(bytes_saved * num_parameters, rel=0.01)
    for its_model, optimizer in ((model, on_host), (other, on_gpu)):
        weights, moments = get_state_dict(its_model, optimizer)
        set_state_dict(its_model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        step(its_model, optimizer, 0.25, 1.0)
    assert all(map(torch.equal, state(model, on_host), state(other, on_gpu)))
    for parameter, entries in on_host.state.items():
        moments = [local_shard(entries[name]) for name in MOMENTS]
        assert all(moment.is_cuda if offload == "weights" else moment.is_pinned() for moment in moments)
        assert local_shard(parameter).is_cuda == (offload == "optimizer") and entries["step"].is_cuda
