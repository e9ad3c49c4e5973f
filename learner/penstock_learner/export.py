"""`penstock export`: writes a checkpoint's policy as a Hugging Face folder that vLLM, SGLang and transformers can load.

One process reads the shards, however many ranks wrote them. An adapter is merged into the weights that it changes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import CheckpointDamaged, ConfigError, NotFound, TrainingDiverged

if TYPE_CHECKING:
    import torch

    from penstock.config.run import RunConfig

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.index.json", "config.json")
"""Files of the model's folder that the export writes itself. All others, such as the tokenizer's, are copied."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="penstock export", description="Write a checkpoint as a Hugging Face folder.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("--out", "--output", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--checkpoint", type=Path, help="folder of a checkpoint (default: the run's newest)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: model.dtype of the run")
    arguments, overrides = parser.parse_known_args(argv)
    from penstock.config.loading import load_config

    config = load_config(arguments.config, overrides)
    checkpoint = _intact(arguments.checkpoint) if arguments.checkpoint else _newest_intact(config)
    export(config, checkpoint, arguments.out, arguments.dtype or config.model.dtype)
    print(f"exported {checkpoint} to {arguments.out}")
    return 0


def export(config: RunConfig, checkpoint: Path, out: Path, dtype: str) -> None:
    """Write the policy of a checkpoint, which is not verified here, to `out`."""
    if out.exists():
        raise ConfigError(f"--out {out} exists already; name a new folder")
    write_folder(_load(config, checkpoint), config.model.path, out, dtype)


def write_folder(lm: Any, source: Path, out: Path, dtype: str) -> None:
    """Write a Hugging Face model, and copy the other files of its `source` folder.

    The folder is written under a temporary name and then renamed, so `out` is complete or does not exist. Raises
    TrainingDiverged, and writes nothing, if a weight is not finite in `dtype`."""
    from penstock_learner.model.finite import first_nonfinite
    from penstock_learner.model.precision import DTYPES

    for parameter in lm.parameters():  # not the buffers: routers' biases stay in float32
        parameter.data = parameter.data.to(DTYPES[dtype])
    if name := first_nonfinite(lm.named_parameters()):
        raise TrainingDiverged(f"{name} is not finite in {dtype}, so {out} is not written; choose another checkpoint")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, ignore=shutil.ignore_patterns(*WEIGHT_FILES))
    lm.save_pretrained(partial)
    partial.rename(out)


def _intact(checkpoint: Path) -> Path:
    """The same folder. Raises CheckpointDamaged if one of its files is damaged."""
    from penstock_learner.checkpoints.loading import verify_in_this_process

    if not (checkpoint / ".metadata").is_file():
        raise ConfigError(f"--checkpoint {checkpoint} is not a checkpoint; give a folder of RUN/checkpoints/")
    verify_in_this_process(checkpoint)
    return checkpoint


def _newest_intact(config: RunConfig) -> Path:
    """The run's newest checkpoint without damage. A line on stderr names each damaged one before it."""
    from penstock_learner.checkpoints.checkpoint import CheckpointStore
    from penstock_learner.checkpoints.loading import verify_in_this_process

    for path in CheckpointStore(config.folder / "checkpoints", keep=1).of_the_run():
        try:
            verify_in_this_process(path)
            return path
        except CheckpointDamaged as error:
            print(f"checkpoint {path.name} is left out: {error}", file=sys.stderr)
    raise NotFound(f"run {config.run} has no intact checkpoint in {config.folder}; train first, or give --checkpoint")


def _load(config: RunConfig, checkpoint: Path) -> Any:
    """The Hugging Face model with the checkpoint's weights, on the CPU."""
    import torch
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_shards

    from penstock_learner.checkpoints.checkpoint import shards_folder
    from penstock_learner.model.adapter import add_adapter
    from penstock_learner.model.causal_lm import CausalLM, load_model
    from penstock_learner.model.published_layout import fit_to_folder

    def load() -> CausalLM:
        loaded = load_model(config.model.path, torch.float32, config.learner.logprob_chunk_tokens)
        fit_to_folder(loaded.lm, config.model.path, "model.path")
        return loaded

    lora = config.learner.lora
    model = load()
    if lora is not None:
        add_adapter(model, lora)
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # DCP warns that only one process loads
            load_shards(state, checkpoint_id=shards_folder(checkpoint, "policy"), no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise ConfigError(
            f"checkpoint {checkpoint} does not fit model.path {config.model.path} ({type(error).__name__}); give the "
            "config that the run was trained with"
        ) from error
    set_model_state_dict(model, state["model"])
    if lora is None:
        return model.lm
    plain = load().lm
    plain.load_state_dict(_merged(model.lm))
    return plain


def _merged(lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights under their plain names, with the adapter merged in."""
    from peft.tuners.lora import LoraLayer

    for module in lm.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    return {
        name.replace(".base_layer.", "."): weight for name, weight in lm.state_dict().items() if ".lora_" not in name
    }
