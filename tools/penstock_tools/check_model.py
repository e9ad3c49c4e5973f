"""`penstock check-model FOLDER`: whether the learner trains a model correctly, and on which path.

$ penstock check-model Qwen2.5-0.5B
model       qwen2, 494.0M parameters, float32
path        packed
difference  4.3e-06 (at most 0.001) from Hugging Face's own forward, sequences up to 72 tokens
right
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.cli.parser import Parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="penstock check-model",
        description="Check that the learner computes a model as Hugging Face does, and say on which path: packed or "
        "padded.",
    )
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder, or a Hub id")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type to compute in")
    arguments = parser.parse_args(argv)
    import torch

    from penstock.hub import local_model
    from penstock_learner.model.causal_lm import open_model
    from penstock_learner.model.loading import read_weights
    from penstock_learner.model.self_check import compare_with_plain
    from penstock_learner.model.torch_settings import DTYPES

    folder = local_model(arguments.folder, "the model")
    device, dtype = torch.device("cuda" if torch.cuda.is_available() else "cpu"), DTYPES[arguments.dtype]
    model = open_model(folder, dtype, chunk_tokens=2048, key="the model")
    read_weights(model, device)
    check = compare_with_plain(model, str(folder), device, dtype)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    rows = {
        "model": f"{model.lm.config.model_type}, {millions:.1f}M parameters, {arguments.dtype}",
        "path": "packed" if check.is_packed else f"padded, which is slower: {model.path.reason}",
        "difference": f"{check.error:.1e} (at most {check.limit:.2g}) from Hugging Face's own forward, "
        f"sequences up to {check.longest} tokens",
    }
    if not check.is_causal:
        rows["not causal"] = f"replacing the last token changes an earlier one by {check.leak:.1e}"
    for name, text in rows.items():
        print(f"{name:<12}{text}")
    print("right" if check.ok else "WRONG: the learner would train this model incorrectly; use another one")
    return 0 if check.ok else 1
