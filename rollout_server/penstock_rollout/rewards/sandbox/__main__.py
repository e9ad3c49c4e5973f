"""Says which confinement works on this machine: `python -m penstock_rollout.rewards.sandbox [CONFINEMENT]`."""

from __future__ import annotations

import sys
from typing import cast

from penstock.errors import ConfigError
from penstock_rollout.rewards.sandbox.run import Choice, Sandbox


def main() -> int:
    try:
        print(Sandbox.open(cast(Choice, sys.argv[1] if len(sys.argv) > 1 else "auto")).description)
    except ConfigError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
