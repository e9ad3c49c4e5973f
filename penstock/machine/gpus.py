"""The GPUs of this machine, as nvidia-smi lists them. Nothing here imports torch."""

from __future__ import annotations

import os
import shutil
import subprocess

TIMEOUT_S = 20.0


def nvidia_smi(*words: str) -> list[str]:
    """Output lines of nvidia-smi; empty if there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def gpu_names() -> list[str]:
    """The product name of each GPU."""
    return nvidia_smi("--query-gpu=name", "--format=csv,noheader")


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES of a child process may name: the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(len(gpu_names()))]
    return [name for part in visible.split(",") if (name := part.strip()) and name != "-1"]
