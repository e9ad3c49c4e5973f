"""Loads versions into vLLM's models by its own loader and by learned copies, and writes whether both give the same.

On a CPU vLLM packs weights, which no GPU does. Here they are left as they are, so that the models are those of a GPU.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader import get_model

from penstock_rollout.engines.vllm.core import NotPlain, learn, reload


def leave_unpacked(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def next_version(tensors: dict[str, torch.Tensor], seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(each.shape, generator=generator).to(each.dtype)) for name, each in tensors.items()]


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def compare(folder: str) -> str:
    """Return `equal`, why copies were refused, or which tensors differ."""
    arguments = EngineArgs(folder, dtype="float32", max_model_len=64, enforce_eager=True, skip_tokenizer_init=True)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
        saved = load_file(f"{folder}/model.safetensors")
        first, second = next_version(saved, 1), next_version(saved, 2)
        reload(model, config.model_config, second)
        wanted = state_of(model)
        reload(model, config.model_config, first)
        before = state_of(model)
        try:
            copies = learn(model, first)
        except NotPlain as reason:
            return differences(before, state_of(model)) or f"refused: {reason}"
        if changed := differences(before, state_of(model)):
            return changed
        copies.load(second)
        return differences(wanted, state_of(model)) or "equal"


def differences(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> str:
    names = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    return f"differ: {', '.join(names)}" if names else ""


def report(folders: Sequence[Path], output: Path) -> None:
    """Write a line for each model. For a process of its own: it changes vLLM and makes a process group."""
    warnings.simplefilter("default")  # those of pytest are errors
    torch.set_num_threads(1)  # the threads of a process do not survive a fork
    utils.dispatch_cpu_unquantized_gemm = leave_unpacked
    torch.accelerator.empty_cache = lambda: None  # the loader calls it, and there is none
    config = EngineArgs(str(folders[0]), dtype="float32", skip_tokenizer_init=True).create_engine_config()
    with tempfile.TemporaryDirectory() as meeting, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{meeting}/ranks", 0, "gloo")
        initialize_model_parallel()
    with output.open("w") as file:
        for folder in folders:
            try:
                said = compare(str(folder))
            except Exception as error:
                said = f"failed: {error!r}"
            file.write(json.dumps([folder.name, said]) + "\n")
