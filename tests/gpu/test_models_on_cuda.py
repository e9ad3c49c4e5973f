"""Models on a GPU: flash attention with windows, FlexAttention with soft caps and sinks, and recurrent layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock_learner.model.causal_lm import load_model
from penstock_learner.model.self_check import compare_with_plain
from support.tiny_architectures import tiny_model

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own parts
NAMES = ["llama", "mistral", "gemma2, wide head", "gpt_oss", "llama4_text", "granite, scaled", "qwen3_next",
         "nemotron_h"]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_log_probs_on_a_gpu_are_those_of_the_plain_forward(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_model(name, head_dim=32, hidden_size=128, num_hidden_layers=2).save_pretrained(tmp_path)
    device = torch.device("cuda")
    model = load_model(tmp_path, dtype, chunk_tokens=16).to(device)
    check = compare_with_plain(model, "model.path", device, dtype)
    print(name, dtype, check)
    assert check.ok
