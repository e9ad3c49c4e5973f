"""`penstock export`: writes a checkpoint's policy as a Hugging Face folder that vLLM, SGLang and transformers can load.

One process reads the shards, however many ranks wrote them. An adapter is merged into the weights that it changes. With
`--adapter` it is written alone, as peft does.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.parser import Parser, parse_with_overrides
from penstock.errors import CheckpointDamaged, ConfigError, NotFound, TrainingDiverged

if TYPE_CHECKING:
    import torch

    from penstock.config.run import RunConfig
    from penstock_learner.model.causal_lm import CausalLM

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.index.json", "config.json")
"""Files of the model's folder that the export writes itself. All others, such as the tokenizer's, are copied."""
LATEST = (None, Path("latest"), Path("current"))
ADAPTER_PREFIX = "base_model.model."
"""What peft puts before the names of the base model's modules."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="penstock export",
        description="Write a checkpoint of a run as a Hugging Face folder, which vLLM and transformers load.",
        epilog="Example: penstock export --config my-run.yaml --out my-model",
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument("--out", "--output", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--checkpoint", type=Path, help="folder of a checkpoint (default: `latest`, the run's newest)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: model.dtype of the run")
    parser.add_argument("--adapter", action="store_true", help="write the LoRA adapter alone, for peft and engines")
    arguments, overrides = parse_with_overrides(parser, argv)
    from penstock.config.loading import load_config
    from penstock.hub import with_local_model

    config = with_local_model(load_config(arguments.config, overrides))
    checkpoint = _newest(config) if arguments.checkpoint in LATEST else _intact(arguments.checkpoint)
    print(f"reading {checkpoint}", file=sys.stderr, flush=True)
    export(config, checkpoint, arguments.out, arguments.dtype or config.model.dtype, adapter=arguments.adapter)
    print(f"exported {checkpoint} to {arguments.out}")
    return 0


def export(config: RunConfig, checkpoint: Path, out: Path, dtype: str, *, adapter: bool = False) -> None:
    """Write the policy of a checkpoint, which is not verified here, to `out`, or with `adapter` its adapter alone."""
    if out.exists():
        raise ConfigError(f"--out {out} exists already; name a new folder")
    if adapter and config.learner.lora is None:
        raise ConfigError("--adapter: the run has no learner.lora, so there is no adapter; omit --adapter")
    model = _load(config, checkpoint)
    if adapter:
        write_adapter(model.lm, config.model.path, out, dtype)
    else:
        merge_adapter(model.lm)
        write_folder(model.lm, config.model.path, out, dtype)


def write_adapter(lm: Any, base: Path, out: Path, dtype: str) -> None:
    """Write the adapter of a model as `adapter_config.json` and `adapter_model.safetensors`, for the model in `base`.

    `peft.PeftModel.from_pretrained` loads the folder, and so do vLLM and SGLang. The folder is complete or does not
    exist."""
    import peft
    from safetensors.torch import save_file

    from penstock_learner.model.torch_settings import DTYPES

    matrices = {
        f"{ADAPTER_PREFIX}{name}": matrix.to(DTYPES[dtype]).contiguous()
        for name, matrix in peft.get_peft_model_state_dict(lm, save_embedding_layers=False).items()
    }
    _require_finite(matrices.items(), dtype, out)
    described = lm.peft_config["default"]
    described.base_model_name_or_path, described.task_type = str(base), peft.TaskType.CAUSAL_LM
    described.target_modules, described.target_parameters = _shortest_targets(lm, base)
    described.inference_mode = True
    _require_loadable(described, lm)
    with _written_whole(out) as folder:
        folder.mkdir(parents=True)
        described.save_pretrained(str(folder))
        save_file(matrices, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _require_loadable(described: Any, lm: Any) -> None:
    """Raise ConfigError if peft would add the adapter to other weights than those it was trained for: it takes names of
    a mixture's linear layers for those of the experts that transformers fuses."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    taken = deepcopy(described)
    convert_peft_config_for_transformers(taken, lm, None)
    if any(
        set(getattr(taken, name) or ()) != set(getattr(described, name) or ())
        for name in ("target_modules", "target_parameters")
    ):
        raise ConfigError(
            f"the adapter of a {lm.config.model_type} model cannot be written alone: peft would add it to experts, for "
            "which it was not trained; write the model with the adapter merged in"
        )


def _shortest_targets(lm: Any, base: Path) -> tuple[list[str], list[str]]:
    """The adapted modules, and the adapted weights of experts: the last parts of their names, as engines expect, or the
    whole names if others end like them, also in the other parts of a composite model in `base`."""
    from peft.tuners.lora import LoraLayer

    from penstock.weights.folder_tensors import other_parts

    adapters = {name: module for name, module in lm.named_modules() if isinstance(module, LoraLayer)}
    weights = {name for name, module in adapters.items() if hasattr(module, "parameter_name")}
    modules, inner, others = adapters.keys() - weights, tuple(f"{name}." for name in adapters), set(other_parts(base))
    other_modules = {name for name, _ in lm.named_modules() if name not in adapters and not name.startswith(inner)}
    other_modules |= {name.rpartition(".")[0] for name in others}
    own = {name.replace(".base_layer", "") for name, _ in lm.named_parameters()}
    fused = {f"{name.replace('.base_layer', '')}.{adapters[name].parameter_name}" for name in weights}
    return _shortest(modules, other_modules, 1), _shortest(fused, (own | others) - fused, 2)


def _shortest(names: Set[str], others: Iterable[str], num_parts: int) -> list[str]:
    ends = {".".join(name.split(".")[-num_parts:]) for name in names}
    return sorted(names if any(".".join(name.split(".")[-num_parts:]) in ends for name in others) else ends)


def write_folder(lm: Any, source: Path, out: Path, dtype: str) -> None:
    """Write a Hugging Face model, and copy the other files of its `source` folder. Where it is the language model of a
    composite one, the tensors of the other parts are copied as they are.

    The folder is written under a temporary name and then renamed, so `out` is complete or does not exist. Raises
    TrainingDiverged, and writes nothing, if a weight is not finite in `dtype`."""
    from transformers.utils.logging import disable_progress_bar

    from penstock_learner.model.torch_settings import DTYPES

    disable_progress_bar()  # it would be the only line on stderr of a command that goes well
    for parameter in lm.parameters():  # not the buffers: routers' biases stay in float32
        parameter.data = parameter.data.to(DTYPES[dtype])
    _require_finite(lm.named_parameters(), dtype, out)
    with _written_whole(out) as folder:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*WEIGHT_FILES))
        lm.save_pretrained(folder)
        _add_other_parts(source, folder)


def _add_other_parts(source: Path, folder: Path) -> None:
    """Copy the tensors of a composite model that do not belong to its language model, bit for bit, into one more file,
    and write an index of all files."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from penstock.weights.folder_tensors import INDEX, SINGLE, other_parts, weight_files

    if not (names := other_parts(source)):
        return
    if (folder / SINGLE).exists():
        (folder / SINGLE).rename(folder / "model-language.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    for path in weight_files(source):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in set(names).intersection(file.keys())}
    save_file(tensors, folder / "model-others.safetensors", metadata={"format": "pt"})
    size = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path.name)
        size += path.stat().st_size
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2))


@contextmanager
def _written_whole(out: Path) -> Iterator[Path]:
    """Yield a folder to make and fill. It becomes `out` if nothing was raised."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    partial.rename(out)


def _require_finite(tensors: Iterable[tuple[str, torch.Tensor]], dtype: str, out: Path) -> None:
    from penstock_learner.weights.staging import first_nonfinite

    if name := first_nonfinite(tensors):
        raise TrainingDiverged(f"{name} is not finite in {dtype}, so {out} is not written; choose another checkpoint")


def _intact(checkpoint: Path) -> Path:
    """The same folder. Raises CheckpointDamaged if one of its files is damaged."""
    from penstock_learner.checkpoints import verify_in_this_process

    if not (checkpoint / ".metadata").is_file():
        raise ConfigError(f"--checkpoint {checkpoint} is not a checkpoint; give a folder of RUN/checkpoints/")
    verify_in_this_process(checkpoint)
    return checkpoint


def _newest(config: RunConfig) -> Path:
    """The run's newest checkpoint. Raises CheckpointDamaged if it is damaged: an older one is only exported by name."""
    from penstock_learner.checkpoints import CheckpointStore, first_intact

    found, damaged = first_intact(CheckpointStore(config.folder / "checkpoints", keep=1).of_the_run())
    names = "; ".join(damaged)
    if found and damaged:
        raise CheckpointDamaged(f"{names}; to export the newest intact one, give --checkpoint {found}")
    if damaged:
        raise CheckpointDamaged(f"no checkpoint is intact: {names}; restore the files from a backup")
    if found is None:
        raise NotFound(f"run {config.run} has no checkpoint in {config.folder}; train first, or give --checkpoint")
    return found


def _load(config: RunConfig, checkpoint: Path) -> CausalLM:
    """The model with the checkpoint's weights, and with its adapter next to them if it has one, on the CPU."""
    import torch
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    from penstock_learner.checkpoints import shards_folder
    from penstock_learner.model.adapter import add_adapter
    from penstock_learner.model.causal_lm import load_model
    from penstock_learner.model.published_layout import fit_to_folder
    from penstock_learner.shards import load_shards

    model = load_model(config.model.path, torch.float32, config.learner.logprob_chunk_tokens)
    fit_to_folder(model.lm, config.model.path, "model.path")
    if config.learner.lora is not None:
        add_adapter(model, config.learner.lora)
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # DCP warns that only one process loads
            load_shards(state, shards_folder(checkpoint, "policy"), no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise ConfigError(
            f"checkpoint {checkpoint} does not fit model.path {config.model.path} ({type(error).__name__}); give the "
            "config that the run was trained with"
        ) from error
    set_model_state_dict(model, state["model"])
    return model


def merge_adapter(lm: Any) -> None:
    """Merge the adapter, if there is one, into the weights that it changes, and remove it from the model."""
    from peft.tuners.lora import LoraLayer

    adapters = [(name, module) for name, module in lm.named_modules() if isinstance(module, LoraLayer)]
    for name, module in adapters:
        module.merge()
        if not name.endswith(".base_layer"):  # inside of another one: weights of the same experts
            lm.set_submodule(name, module.get_base_layer())
        if hasattr(module, "parameter_name"):
            module.get_base_layer().adapters = {}
