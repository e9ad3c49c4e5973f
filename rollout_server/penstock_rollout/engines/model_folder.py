"""Read the stop tokens of a Hugging Face model folder, before an engine loads it."""

from __future__ import annotations

from pathlib import Path

from penstock.weights.folder_tensors import read_json


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a response: those of generation_config.json, else those of config.json."""
    for name in ("generation_config.json", "config.json"):
        eos = read_json(folder / name).get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()
