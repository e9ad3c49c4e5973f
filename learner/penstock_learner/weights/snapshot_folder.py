"""Write a staged version as a folder that engines and Hugging Face can load."""

from __future__ import annotations

import shutil
from pathlib import Path

from penstock.weights.deadline import Deadline
from penstock.weights.snapshot import write_snapshot
from penstock_learner.weights.staging import StagedVersion

MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
               "merges.txt", "special_tokens_map.json", "chat_template.jinja")  # fmt: skip


def write_snapshot_folder(staged: StagedVersion, model_path: Path, folder: Path, deadline: Deadline) -> None:
    """Write the weights, once they are complete, and copy the small files of the model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODEL_FILES:
        if (source := model_path / name).is_file():
            shutil.copyfile(source, folder / name)  # without its mode
    checksums = staged.checksums(deadline)
    write_snapshot(folder, staged.manifest, [bucket.cpu().numpy() for bucket in staged.memory.buckets], checksums)
