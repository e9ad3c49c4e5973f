"""Models and datasets of the Hugging Face Hub: a config may name them by id, and they are fetched once.

Each process resolves the ids before it starts anything else, so that no rank and no engine makes a network call.
HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE apply. A path that exists on this machine is never looked up.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Literal

from penstock.config.dataset import DatasetConfig, Files, listed_files
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, one_line

MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
DATASET_FILES = ("*.parquet", "*.jsonl", "*.ndjson")
_ID = re.compile(r"^(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w.-]+))?(?:/(?P<part>.+))?$")


def with_local_model(config: RunConfig) -> RunConfig:
    """The config with a folder in place of the Hub id of the trained model."""
    return config.changed({"model.path": local_model(config.model.path, "model.path")})


def with_local_models(config: RunConfig) -> RunConfig:
    """The config with a folder, downloaded if needed, in place of each Hub id of the learner's models."""
    learner = config.learner
    roles = {name: getattr(learner, name) for name in ("reference", "critic", "reward_model")}
    paths = {f"learner.{name}.path": role.path for name, role in roles.items() if role is not None and role.path}
    local: dict[str, object] = {field: local_model(path, field) for field, path in paths.items()}
    local["learner.roles"] = {
        name: role.changed({"path": local_model(role.path, f"learner.roles.{name}.path")}) if role.path else role
        for name, role in learner.roles.items()
    }
    return with_local_model(config).changed(local)


def with_local_datasets(config: RunConfig) -> RunConfig:
    """The config with a file or pattern, downloaded if needed, in place of each Hub id of a dataset."""
    return with_local_files(config.changed({"dataset.data_source": data_source_of(config.dataset)}), "dataset")


def data_source_of(dataset: DatasetConfig) -> str:
    """The data source of rows that have none: the one of the config, or the id of the only Hub dataset."""
    return dataset.data_source or _hub_source(dataset.file) or _hub_source(dataset.validation.file)


def with_local_files(config: RunConfig, section: str) -> RunConfig:
    """The config with a file or pattern in place of each Hub id of `dataset` or of `sft`."""
    data, train, held_out = getattr(config, section), f"{section}.file", f"{section}.validation.file"
    files = {train: _local_files(data.file, train, "train")}
    return config.changed(files | {held_out: _local_files(data.validation.file, held_out, "test")})


def local_model(path: Path, field: str, files: tuple[str, ...] = MODEL_FILES, target: Path | None = None) -> Path:
    """The folder of a model: the path itself, or a Hub id's files, such as those of `Qwen/Qwen2.5-0.5B@main`. They are
    in the cache, or in `target`, where an interrupted download is continued and compared with the Hub's checksums."""
    found = _hub_id(path)
    if found is None or found["part"]:
        return path
    return _download("model", found["id"], found["revision"], files, field, target)


def is_hub_id(path: Path) -> bool:
    """Whether a path would be looked up on the Hub."""
    return _hub_id(path) is not None


def is_model_id(path: Path) -> bool:
    """Whether a path would be fetched from the Hub as a model, which has no parts."""
    found = _hub_id(path)
    return found is not None and not found["part"]


def _local_files(files: Files | None, field: str, split: str) -> Files | None:
    """The same entries, with a local path or pattern in place of each Hub id."""
    entries = listed_files(files)
    if all(_hub_id(entry.file) is None for entry in entries):
        return files
    return tuple(entry.changed({"file": _local_dataset(entry.file, field, split)}) for entry in entries)


def _local_dataset(path: Path, field: str, split: str) -> Path:
    """The files of a dataset's id: those of `part`, or those of `split` if there is only one set of them."""
    found = _hub_id(path)
    if found is None:
        return path
    part = found["part"] or ""
    wanted = tuple(f"{part}*{suffix[1:]}" for suffix in DATASET_FILES) + (part,) if part else DATASET_FILES
    folder = _download("dataset", found["id"], found["revision"], wanted, field)
    names = [
        name
        for name in sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        if any(fnmatch.fnmatch(name, pattern) for pattern in wanted)
    ]
    if not part:
        names = [name for name in names if Path(name).name.startswith(split)] or names
    groups = sorted({re.sub(r"-\d+-of-\d+", "-*", name) for name in names})
    if len(groups) == 1:
        return folder / groups[0]
    if not groups:
        raise ConfigError(
            f"{field}: {path} has no Parquet or JSONL files on the Hub; convert it, or use dataset.loader"
        )
    choices = ", ".join(f"{found['id']}/{group.partition('-*')[0]}" for group in groups[:8])
    raise ConfigError(f"{field}: {path} has several sets of files; choose one of {choices}")


def _hub_id(path: Path) -> re.Match[str] | None:
    """The parts of a Hub id; None for a path whose first folder exists, that is absolute, or has another form."""
    if path.is_absolute() or Path(path.parts[0] if path.parts else ".").exists():
        return None
    return _ID.match(str(path).removeprefix("hf:/datasets/"))


def _hub_source(files: Files | None) -> str:
    """The id of the only Hub dataset; empty if there is none or several."""
    ids = {found["id"] for entry in listed_files(files) if (found := _hub_id(entry.file)) is not None}
    return ids.pop() if len(ids) == 1 else ""


def _download(
    kind: Literal["model", "dataset"],
    name: str,
    revision: str | None,
    patterns: tuple[str, ...],
    field: str,
    target: Path | None = None,
) -> Path:
    """The folder of the files: in the cache, or `target`, whose files are compared with the Hub's checksums."""
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ImportError as error:
        raise ConfigError(f"{field}: {name} is not here, and huggingface_hub is not installed; install it") from error
    try:
        folder = snapshot_download(
            name, repo_type=kind, revision=revision, allow_patterns=list(patterns), local_dir=target
        )
        if target is not None:
            _compare(name, revision, target)
        return Path(folder)
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        where = "the cache (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else f"the Hub at {constants.ENDPOINT}"
        raise ConfigError(
            f"{field}: {name} is neither a path on this machine nor a {kind} that {where} gives: "
            f"{one_line(error)[:300]}; check the name, HF_TOKEN and the connection"
        ) from error


def _compare(name: str, revision: str | None, target: Path) -> None:
    """Raise ConfigError, and remove the damaged files, if they differ from the Hub's."""
    from huggingface_hub import HfApi

    verified = HfApi().verify_repo_checksums(name, revision=revision, local_dir=target)
    damaged = [wrong["path"] for wrong in verified.mismatches]
    for path in damaged:
        (target / path).unlink(missing_ok=True)
    if damaged:
        names = ", ".join(damaged)
        raise ConfigError(f"SOURCE: {names} of {name} arrived damaged and was removed; fetch again")
