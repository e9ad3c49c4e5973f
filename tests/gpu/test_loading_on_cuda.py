"""Weights that are read to a GPU, or to pinned host memory, are those of `from_pretrained`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from penstock.config.learner import LearnerConfig
from penstock_learner.model.causal_lm import open_model
from penstock_learner.model.loading import prepare_for_training, read_weights
from penstock_learner.model.published_layout import full_weight
from penstock_learner.model.self_check import require_right
from support.tiny_architectures import tiny_model

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def one_gpu_rank() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_gpu_rank")
@pytest.mark.parametrize("offload", [False, True], ids=["gpu", "offloaded"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2, wide head"])
def test_sharded_weights_are_read_to_their_place(name: str, offload: bool, tmp_path: Path) -> None:
    tiny_model(name, head_dim=32, hidden_size=128, num_hidden_layers=2).save_pretrained(tmp_path)
    device = torch.device("cuda", 0)
    model = open_model(tmp_path, torch.float32, 16)
    learner = LearnerConfig(offload="all" if offload else "none")
    prepare_for_training(model, learner, torch.bfloat16, is_cuda=True)
    read_weights(model, device, offload=offload)
    plain = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    for parameter_name, parameter in model.lm.named_parameters():
        assert parameter.device.type == ("cpu" if offload else "cuda")
        assert torch.equal(full_weight(parameter.detach()).cpu(), plain[parameter_name]), parameter_name
    assert all(buffer.device.type == "cuda" for buffer in model.buffers())
    require_right(model, "model.path", device, torch.bfloat16)
