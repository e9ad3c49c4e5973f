"""Entry point of the SGLang process: `python -m penstock_rollout.engines.sglang.child PARENT_PID MODULE ARGUMENTS...`.

It runs MODULE like `python -m MODULE`, and adds two things. First, the process group ends soon after the rollout
server, even if the server was killed. Second, SGLang gets its API key from the environment, because every user of the
host can read a command line.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence

from penstock_rollout.engines.child_process import end_with_parent

API_KEY_VARIABLE = "PENSTOCK_SGLANG_API_KEY"


def main(argv: Sequence[str]) -> None:
    parent_pid, module, *arguments = argv
    assert os.getpgrp() == os.getpid(), "this process must be the leader of its own process group"
    end_with_parent(int(parent_pid), lambda: os.killpg(os.getpgrp(), signal.SIGKILL))
    sys.argv = [module, *arguments, "--api-key", os.environ.pop(API_KEY_VARIABLE)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
