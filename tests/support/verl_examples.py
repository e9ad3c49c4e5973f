"""Imports every training script of a checkout of verl and counts what becomes of their keys. It is run by hand:

python tests/support/verl_examples.py VERL_CHECKOUT [FOLDER ...]
"""

from __future__ import annotations

import collections
import os
import re
import sys
from pathlib import Path

from penstock.errors import PenstockError
from penstock_tools.verl_import.command import import_words

ENTRY = re.compile(r"main_(ppo|dapo|generation|eval)\b")


def main(checkout: str, *folders: str) -> int:
    os.chdir(checkout)
    scripts = [
        path
        for folder in folders or ("examples", "recipe/dapo")
        for path in sorted(Path(folder).rglob("*.sh"))
        if ENTRY.search(path.read_text())
    ]
    failures, unknown = [], collections.Counter[str]()
    totals = collections.Counter[str]()
    for path in scripts:
        try:
            findings = import_words([str(path)]).findings
        except PenstockError as error:
            failures.append(f"{path}: {error}")
            continue
        unknown.update(name for name, _, reason in findings.missing if reason == "this key is not known")
        totals += collections.Counter(
            same=findings.num_same, changed=len(findings.changed), unneeded=len(findings.unneeded),
            missing=len(findings.missing),
        )  # fmt: skip
        for note in findings.notes:
            print(f"{path}: {note}")
    print("\n".join(failures))
    print(f"{len(scripts) - len(failures)} of {len(scripts)} scripts import; keys: {dict(totals)}")
    print(f"keys that are not in the table: {dict(unknown)}")
    return bool(failures or unknown)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
