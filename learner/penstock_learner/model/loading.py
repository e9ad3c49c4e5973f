"""From a model folder to a model's memory, without the whole model in any rank.

    open_lm            a Hugging Face model on the meta device; its buffers are real, its parameters have no memory
    add_adapter        (model/adapter.py, if the run trains one)
    shard              FSDP2: each parameter becomes this rank's part of it, still without memory
    read_weights       memory for the parts, and the numbers from the files

Parameters and buffers are those of `from_pretrained`, bit for bit. While it reads, a rank holds its part of the
parameters, and besides at most `PIECE_BYTES` of a few tensors, or one parameter if its conversion needs it whole.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from penstock.config.learner import LearnerConfig
from penstock.errors import ConfigError
from penstock.weights.folder_tensors import safetensors_of
from penstock_learner.model.architectures import ModelPath, is_composite
from penstock_learner.model.attention.packed_attention import mark_layers
from penstock_learner.model.expert_parallel import dense_mesh, expert_mesh, find_experts, require_experts, shard_experts
from penstock_learner.model.torch_settings import compiler_keeping

logger = logging.getLogger(__name__)
LORA_A, LORA_B = ".lora_A.", ".lora_B."
"""Parts of the names that peft gives to an adapter's two matrices."""


class FolderModel(nn.Module):
    """A model around a Hugging Face one. The sharded root covers embedding, layers and head in one forward pass."""

    def __init__(self, lm: Any, path: ModelPath) -> None:
        super().__init__()
        self.lm = lm
        self.path = path
        self.unread: UnreadWeights | None = None
        """Where the weights are, if the model is still on the meta device."""
        if path.is_packed:
            mark_layers(lm)


def decoder_layers(lm: Any) -> tuple[str, nn.ModuleList]:
    """The decoder layers of a Hugging Face model, and the name under which it has them, such as `model.layers`."""
    config = lm.config.get_text_config()
    found = [
        (name, module)
        for name, module in lm.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if not found:
        raise ConfigError(
            f"model type {lm.config.model_type} has no list of {config.num_hidden_layers} layers, so it cannot be "
            "sharded; use another model"
        )
    return found[0]


@torch.no_grad()
def read_weights(model: FolderModel, device: torch.device, *, offload: bool = False) -> None:
    """Give the model its memory and its weights. With `offload` the parameters stay in host memory. Each rank reads its
    own part, so no rank waits for another. A model that has its weights is only moved."""
    tied = _tied_parameters(model)
    give_memory = partial(_with_memory, device=device, home=torch.device("cpu") if offload else device)
    model._apply(give_memory)  # type: ignore[no-untyped-call]
    for (module, name), *others in tied:
        for other, other_name in others:
            setattr(other, other_name, getattr(module, name))
    if model.unread is not None:
        model.unread.read_into(model.lm)
        model.unread = None


def open_lm(
    kind: Any, folder: Path, config: Any, key: str, *, new_head: str = "", **settings: Any
) -> tuple[Any, UnreadWeights | None]:
    """A Hugging Face model on the meta device, of an Auto class, and its `UnreadWeights`. Parameters whose names begin
    with `new_head` become zeros if the folder lacks them. Weights that are not safetensors, or are quantized, are
    loaded whole: then the second value is None."""
    files = safetensors_of(folder)
    if not files or getattr(config, "quantization_config", None) is not None:
        logger.warning(
            "%s %s is loaded whole in every rank, because its weights are %s", key, folder,
            "quantized" if files else "not safetensors",
        )  # fmt: skip
        return kind.from_pretrained(folder, config=config, local_files_only=True, **settings), None
    lm = make_lm(kind, config, **settings).eval()
    _keep_in_float32(lm, settings["dtype"])
    unread = UnreadWeights(lm, TensorFiles(files), f"{key} {folder}", new_head)
    unread.make_buffers(lm)
    _read_generation_config(lm, folder)
    return lm, unread


def make_lm(kind: Any, config: Any, **settings: Any) -> Any:
    """A Hugging Face model on the meta device, of an Auto class. A composite one keeps its type and has only its
    language model: where the Auto class is not one of causal models, with a head `score`."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    with torch.device("meta"):
        if not is_composite(config):
            return kind.from_config(config, **settings)
        lm = AutoModelForMultimodalLM.from_config(config, **settings)
        _drop_other_parts(lm)
        if kind is not AutoModelForCausalLM:
            _put_score(lm, config)
    return lm


def _drop_other_parts(lm: Any) -> None:
    """Take out of a composite model what is neither its language model nor on the way to it, nor its head."""
    decoder, head = lm.get_decoder(), lm.get_output_embeddings()
    kept = {id(module) for part in (decoder, head) if part is not None for module in part.modules()}
    for parent in [module for module in lm.modules() if id(module) not in kept]:
        for name, parameter in list(parent._parameters.items()):
            delattr(parent, name)
            parent.register_buffer(name, parameter, persistent=False)  # transformers still gives it first numbers
        for name, child in parent.named_children():
            if not any(id(module) in kept for module in child.modules()):
                setattr(parent, name, None)


def _put_score(lm: Any, config: Any) -> None:
    """Replace the head by one that gives a number, called as in a sequence classifier."""
    head = lm.get_output_embeddings()
    name = next(name for name, module in lm.named_modules() if module is head)
    lm.set_submodule(name, nn.Identity())
    lm.score = nn.Linear(head.in_features, config.num_labels, bias=False, dtype=head.weight.dtype)
    lm.all_tied_weights_keys = {}


class UnreadWeights:
    """The weights of a model on the meta device, which are still in its folder's files."""

    def __init__(self, lm: Any, files: TensorFiles, source: str, new_head: str) -> None:
        self._files = files
        self._source = source
        self._new_head = new_head
        self._config = lm.config
        self._recipes = recipes_of(lm, files.names)
        self._shapes = SimpleNamespace(get_parameter=lm.state_dict().__getitem__)
        """Answers what conversions ask a model for: the shape of a parameter."""
        self._untie_different(lm)

    def make_buffers(self, lm: Any) -> None:
        """Give the buffers memory, and their numbers: from the files or, as `from_pretrained` does, computed."""
        recipes = {recipe.target: recipe for recipe in self._recipes}
        for path, module in lm.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_meta:
                    continue
                module._buffers[name] = made = torch.empty_like(buffer, device="cpu")
                full_name = f"{path}.{name}" if path else name
                if full_name in recipes and name not in module._non_persistent_buffers_set:
                    made.copy_(self._whole(recipes[full_name], made.dtype)[full_name])
                    made._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark
        for module in lm.modules():
            module._is_hf_initialized = False
        for parameter in lm.parameters():
            parameter._is_hf_initialized = True
        lm.initialize_weights()
        self._files.close()

    def read_into(self, lm: Any) -> None:
        """Fill the parameters, of which this rank may have a part. Raises ConfigError if one is not in the files."""
        named = dict(lm.named_parameters(remove_duplicate=False))
        _make_adapter({name: parameter for name, parameter in named.items() if is_adapter(name)})
        parameters = {name.replace(".base_layer", ""): parameter for name, parameter in named.items()}
        filled = {id(parameter) for name, parameter in named.items() if is_adapter(name)}
        for recipe in self._recipes:
            filled |= {id(parameters[name]) for name in self._fill(recipe, parameters)}
        self._files.close()
        for name, parameter in parameters.items():
            if id(parameter) in filled:
                continue
            if not (self._new_head and name.startswith(self._new_head)):
                raise ConfigError(f"{self._source} has no weight {name}; give a complete checkpoint of the model")
            OwnPart.of(parameter).numbers.zero_()

    def _fill(self, recipe: Recipe, parameters: dict[str, nn.Parameter]) -> list[str]:
        """Fill the parameters of one recipe. Returns their names."""
        parameter = parameters.get(recipe.target)
        if parameter is None:  # a buffer
            return []
        if parameter.dim() and (recipe.conversion is None or recipe.keeps_rows):
            self._fill_rows(recipe, parameter)
            return [recipe.target]
        made = self._whole(recipe, parameter.dtype)
        for name, whole in made.items():
            self._check_shape(name, whole.shape, parameters[name].shape)
            OwnPart.of(parameters[name]).take(whole)
        return list(made)

    def _fill_rows(self, recipe: Recipe, parameter: nn.Parameter) -> None:
        own = OwnPart.of(parameter)
        if recipe.conversion is None:
            self._check_shape(recipe.target, self._files.shape(recipe.sources[0][1]), parameter.shape)
        for first, rows in self._pieces(recipe, parameter, own.start, own.stop):
            self._check_shape(recipe.target, rows.shape[1:], parameter.shape[1:])
            own.put(first, rows)

    def _pieces(self, recipe: Recipe, parameter: nn.Parameter, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Rows `start` to `stop`, a few at a time, each with the index of the first. A conversion must keep rows."""
        if recipe.conversion is None:
            yield from self._files.pieces(recipe.sources[0][1], start, stop)
            return
        num_rows = max(1, PIECE_BYTES // (math.prod(parameter.shape[1:]) * parameter.dtype.itemsize))
        for first in range(start, stop, num_rows):
            rows = range(first, min(first + num_rows, stop))
            yield first, self._whole(recipe, parameter.dtype, rows)[recipe.target]

    def _whole(self, recipe: Recipe, dtype: torch.dtype, rows: range | None = None) -> dict[str, Tensor]:
        """The parameters of a recipe by name. A conversion makes them in `dtype`, or only these `rows` if it keeps
        rows."""
        if recipe.conversion is None:
            return {recipe.target: self._files.whole(recipe.sources[0][1])}
        conversion, counts = deepcopy(recipe.conversion), Counter[str]()
        for pattern, name in recipe.sources:
            if rows is None or counts[pattern] in rows:
                conversion.add_tensor(recipe.target, name, pattern, partial(self._files.whole, name, dtype))
            counts[pattern] += 1
        made = conversion.convert(recipe.target, model=self._shapes, config=self._config)
        return {name: made_of[0] if isinstance(made_of, list) else made_of for name, made_of in made.items()}

    def _check_shape(self, name: str, found: torch.Size, wanted: torch.Size) -> None:
        if found != wanted:
            raise ConfigError(
                f"{self._source}: {name} has the shape {list(found)} in the files, but config.json asks for "
                f"{list(wanted)}; give a checkpoint that fits its config.json"
            )

    def _untie_different(self, lm: Any) -> None:
        """Separate parameters that the config ties, but whose numbers in the files differ."""
        sources = {recipe.target: recipe.sources[0][1] for recipe in self._recipes if recipe.conversion is None}
        for tied, to in list(lm.all_tied_weights_keys.items()):
            if tied in sources and to in sources and not self._is_equal(sources[tied], sources[to]):
                path, _, name = tied.rpartition(".")
                module = lm.get_submodule(path)
                setattr(module, name, nn.Parameter(torch.empty_like(getattr(module, name))))
                del lm.all_tied_weights_keys[tied]
                logger.warning("%s: %s and %s are not tied, because they differ", self._source, tied, to)

    def _is_equal(self, name: str, other: str) -> bool:
        shape = self._files.shape(name)
        if shape != self._files.shape(other):
            return False
        both = zip(self._files.pieces(name, 0, shape[0]), self._files.pieces(other, 0, shape[0]), strict=True)
        return all(torch.equal(rows, other_rows) for (_, rows), (_, other_rows) in both)


@dataclass(frozen=True)
class OwnPart:
    """This rank's rows of a parameter: all of them if it is not sharded."""

    numbers: Tensor
    start: int
    """Index of the first row in the whole parameter."""

    @classmethod
    def of(cls, parameter: Tensor) -> OwnPart:
        if not isinstance(parameter, DTensor):
            return cls(parameter.data, 0)
        start, num_rows, mesh = 0, parameter.shape[0], parameter.device_mesh
        # FSDP2 divides what expert parallelism, the last dimension, has divided before.
        for dimension, placement in reversed(list(enumerate(parameter.placements))):
            if not placement.is_replicate():
                share = math.ceil(num_rows / mesh.size(dimension))
                skipped = min(mesh.get_local_rank(dimension) * share, num_rows)
                start, num_rows = start + skipped, min(share, num_rows - skipped)
        numbers = parameter.to_local()
        assert numbers.numel() == num_rows * math.prod(parameter.shape[1:]), "only rows are sharded"
        return cls(numbers, start)

    @property
    def stop(self) -> int:
        return self.start + (len(self.numbers) if self.numbers.numel() else 0)

    def put(self, first: int, rows: Tensor) -> None:
        """Copy rows of the whole parameter, all of which are this rank's."""
        place = self.numbers[first - self.start : first - self.start + len(rows)]
        place.copy_(rows.to(place.device))  # cast on the device

    def take(self, whole: Tensor) -> None:
        if whole.dim() == 0:
            self.numbers.copy_(whole)
        elif self.stop > self.start:
            self.put(self.start, whole[self.start : self.stop])


def _with_memory(tensor: Tensor, device: torch.device, home: torch.device) -> Tensor:
    where = home if isinstance(tensor, nn.Parameter) else device
    return torch.empty_like(tensor, device=where) if tensor.device.type == "meta" else tensor.to(where)


def _tied_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of every parameter that a model has in several places. Giving them memory separates them."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [each for each in places.values() if len(each) > 1]


def is_adapter(name: str) -> bool:
    return LORA_A in name or LORA_B in name


def _make_adapter(parameters: dict[str, nn.Parameter]) -> None:
    """First numbers of an adapter, as peft chooses them. Ranks with the same seed make parts of the same matrices."""
    for name, parameter in parameters.items():
        if LORA_A in name:
            whole = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
            OwnPart.of(parameter).take(whole)
        else:
            OwnPart.of(parameter).numbers.zero_()


def _keep_in_float32(lm: Any, dtype: torch.dtype) -> None:
    """Change the type of the weights that a model keeps in float32, whatever type it is loaded in."""
    plan = lm._get_dtype_plan(dtype)
    if not plan:
        return
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in plan))
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if kept.search(name):
            path, _, own_name = name.rpartition(".")
            module, precise = lm.get_submodule(path), torch.empty_like(tensor, dtype=torch.float32)
            setattr(module, own_name, nn.Parameter(precise) if isinstance(tensor, nn.Parameter) else precise)


def _read_generation_config(lm: Any, folder: Path) -> None:
    """An export writes the generation config, so it must be the folder's."""
    if lm.can_generate() and (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        lm.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


# ── which tensors of the files make up which parameters ──
#
# Most parameters are one tensor, perhaps under another name. Some are made of several, such as the experts of a layer,
# which files hold one by one and models hold together. transformers describes both as renamings and conversions, which
# are used here as `from_pretrained` uses them.


@dataclass(frozen=True)
class Recipe:
    """Makes one parameter or buffer of tensors in files, or several if a tensor is split."""

    target: str
    """The parameter's name, or the first parameter's name."""
    sources: tuple[tuple[str, str], ...]
    """The tensors, each after the pattern of the conversion that it fits."""
    conversion: Any = None
    """A `WeightConverter` of transformers. None if the parameter is the only source, unchanged."""

    @property
    def keeps_rows(self) -> bool:
        """Whether row `i` of the parameter is made of the `i`-th tensor of each pattern, and of nothing else."""
        from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

        if self.conversion is None or not isinstance(self.conversion.operations[0], MergeModulelist):
            return False
        return self.conversion.operations[0].dim == 0 and all(
            (isinstance(step, Concatenate) and step.dim > 0)
            or (isinstance(step, Transpose) and min(step.dim0, step.dim1) > 0)
            for step in self.conversion.operations[1:]
        )


def recipes_of(lm: Any, names: list[str]) -> list[Recipe]:
    """The recipes for a Hugging Face model, from files with tensors of these names. Tensors that fit nothing are
    skipped, as `from_pretrained` skips them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(lm)
    renamings, converters = split_conversions(mapping)
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = lm.state_dict(), lm.base_model_prefix
    found: dict[str, Recipe] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            continue
        if pattern is None:
            found.setdefault(target, Recipe(target, ((name, name),)))
            continue
        begun = found.get(target, Recipe(target, (), converter_of[pattern]))
        found[target] = Recipe(target, (*begun.sources, (pattern, name)), begun.conversion)
    # Saving the model reverts the conversions that were used. Older versions of transformers revert all of them.
    lm._weight_conversions = [each for each in mapping if getattr(each, "was_used", lambda: True)()]
    return list(found.values())


def split_conversions(conversions: list[Any]) -> tuple[list[Any], list[Any]]:
    """The renamings and the converters among the conversions of transformers."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    return renamings, [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]


# ── the safetensors files of a model folder, read slice by slice ──

PIECE_BYTES = 2**24
"""Most that is read at once of one tensor, if its rows are not longer."""
_MAPPED_BYTES = 2**25
"""Files are closed after this many bytes. Their pages, which are mapped into memory, count as the process's own."""


class TensorFiles:
    """Reads slices of tensors by name. Besides what it returns, it holds at most about `_MAPPED_BYTES`."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._file_of: dict[str, Path] = {}
        self._opened: dict[Path, Any] = {}
        self._num_mapped = 0
        for file in files:
            self._file_of |= dict.fromkeys(self._open(file).keys(), file)

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._slice(name).get_shape())

    def whole(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor. It is a view of a mapped file, unless it is converted to `dtype`."""
        tensor: Tensor = self._open(self._file_of[name]).get_tensor(name)
        self._count(tensor)
        return tensor if dtype is None else tensor.to(dtype)

    def pieces(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Rows `start` to `stop` of a tensor, a few at a time, each with the index of its first row."""
        if start >= stop:
            return
        num_rows = max(1, PIECE_BYTES // max(1, self._slice(name)[start : start + 1].nbytes))
        for first in range(start, stop, num_rows):
            rows: Tensor = self._slice(name)[first : min(first + num_rows, stop)]
            yield first, rows
            self._count(rows)

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        self._opened.clear()
        self._num_mapped = 0

    def _slice(self, name: str) -> Any:
        return self._open(self._file_of[name]).get_slice(name)

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt")
        return self._opened[file]

    def _count(self, tensor: Tensor) -> None:
        self._num_mapped += tensor.nbytes
        if self._num_mapped > _MAPPED_BYTES:
            self.close()


# ── training ──


def prepare_for_training(
    model: FolderModel, learner: LearnerConfig, compute_dtype: torch.dtype, *, is_cuda: bool
) -> None:
    """Choose which layers are recomputed, compile them where the config says so, and shard the model. Gradients are
    reduced in float32 whatever the compute type is. Raises ConfigError for quantized weights."""
    if is_quantized(model):
        raise ConfigError(
            f"a model of type {model.lm.config.model_type} with quantized weights cannot be trained; give a folder "
            "with its weights in bfloat16 or float32"
        )
    layers = list(decoder_layers(model.lm)[1])
    # The activations of the first layers live longest. Gradients take the memory that the last layers free.
    num_recomputed = round(len(layers) * learner.activation_checkpointing)
    for index, layer in enumerate(layers):
        is_recomputed = index < num_recomputed
        if learner.compile:
            # Recomputed activations live for one layer's backward pass only, so keeping fewer of them saves nothing.
            kept = 1.0 if is_recomputed else learner.activation_memory
            # The compiler does not see FSDP2's hooks inside of a layer, such as those of experts that ranks share.
            has_hooks = learner.expert_parallel > 1
            for part in [part for part in layer.children() if not find_experts(part)] if has_hooks else [layer]:
                part.forward = torch.compile(part.forward, backend=compiler_keeping(kept))
        if is_recomputed:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload, kind = host_policy(learner.keeps_weights_on_host, is_cuda=is_cuda), "cuda" if is_cuda else "cpu"
    require_experts(model.lm, learner.expert_parallel)
    meshes = dense_mesh(learner.shard_size, kind), expert_mesh(learner.expert_parallel, learner.shard_size, kind)
    # On a CPU the memory that resharding saves is not worth gathering the weights twice.
    shard(model, reshard_after_forward=is_cuda, precision=precision, offload=offload, meshes=meshes)


def shard(
    model: FolderModel,
    *,
    reshard_after_forward: bool = True,
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    offload: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # frozen
    meshes: tuple[DeviceMesh | None, DeviceMesh | None] = (None, None),
) -> None:
    """Apply FSDP2 over the default process group: to each decoder layer, then to the root with the remaining weights.
    `meshes` are those of the dense weights and of the experts, where they are not all ranks. With a single rank the
    model stays as it is, unless its weights must be cast or offloaded. Quantized weights stay as they are too: every
    rank has all of them."""
    if is_quantized(model):
        return
    types = {parameter.dtype for parameter in model.parameters()}
    if (
        dist.get_world_size() == 1
        and types <= {precision.param_dtype or next(iter(types))}
        and offload == OffloadPolicy()
    ):
        return
    dense, of_experts = meshes
    apply = partial(
        fully_shard, reshard_after_forward=reshard_after_forward, mp_policy=precision, offload_policy=offload
    )
    for layer in decoder_layers(model.lm)[1]:
        if of_experts is not None:
            shard_experts(layer, of_experts, partial(apply, mp_policy=replace(precision, cast_forward_inputs=False)))
        apply(layer, mesh=dense)
    apply(model, mesh=dense)


def host_policy(offload: bool, *, is_cuda: bool) -> OffloadPolicy:
    """FSDP2's policy for weights that are kept in host memory, or on the device."""
    return CPUOffloadPolicy(pin_memory=is_cuda) if offload else OffloadPolicy()


def is_quantized(model: FolderModel) -> bool:
    return getattr(model.lm.config, "quantization_config", None) is not None
