"""The table of verl's keys: the source of the import, of its report and of docs/verl-keys.md."""

from __future__ import annotations

import fnmatch
import functools

from penstock_tools.verl_import.table.key import Key
from penstock_tools.verl_import.table.offline import EVALUATION_KEYS, GENERATION_KEYS
from penstock_tools.verl_import.table.policy import POLICY_KEYS
from penstock_tools.verl_import.table.rollout import ROLLOUT_KEYS
from penstock_tools.verl_import.table.run import DATA_KEYS, REWARD_KEYS, TRAINER_KEYS
from penstock_tools.verl_import.table.sft import FSDP_SFT_KEYS, SFT_KEYS

TRAINING_KEYS = (*TRAINER_KEYS, *DATA_KEYS, *REWARD_KEYS, *ROLLOUT_KEYS, *POLICY_KEYS)
"""In the order in which they are looked up: a name before its patterns, and narrow patterns before wide ones."""
KEYS_BY_PROGRAM: dict[str, tuple[Key, ...]] = {
    "ppo": TRAINING_KEYS,
    "dapo": TRAINING_KEYS,
    "generation": GENERATION_KEYS,
    "eval": EVALUATION_KEYS,
    "sft": SFT_KEYS,
    "fsdp_sft": FSDP_SFT_KEYS,
}


@functools.cache
def find_key(program: str, name: str) -> Key | None:
    """The row of a key: its own, or that of the first pattern it matches. None: the table does not have it."""
    rows = KEYS_BY_PROGRAM[program]
    exact = next((row for row in rows if row.verl == name), None)
    return exact or next((row for row in rows if "*" in row.verl and fnmatch.fnmatchcase(name, row.verl)), None)


def canonical_name(program: str, name: str) -> str:
    """The name of a key in the table, for one that is given by an older or newer name."""
    row = find_key(program, name)
    if row is None or not row.alias_of:
        return name
    stem = row.verl.removesuffix("*")
    return canonical_name(program, row.alias_of.removesuffix("*") + (name[len(stem) :] if stem != row.verl else ""))


def default_of(program: str, name: str) -> object:
    row = find_key(program, name)
    return None if row is None else row.default
