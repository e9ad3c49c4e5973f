"""Keeps what processes compile when they start: vLLM's graphs, torch's and Triton's kernels, and those of CUDA.

Compiling takes a minute or more of a first start. Every library looks for its results in a folder, which is named by an
environment variable. Here all of them are put into `cache_dir`, so that they outlive the process, its container and its
run. The libraries choose the file by everything that it depends on: another version of torch or another GPU compiles
again, and the old files stay until someone deletes the folder.

Some of these files are loaded as code. The folder is as private as the run's own, and only its owner may write to it.
"""

from __future__ import annotations

import os

from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.machine.private_files import close_to_others

VARIABLES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "CUDA_CACHE_PATH": "cuda",
}
"""Environment variables of the libraries, with the folder that each gets inside `cache_dir`."""


def keep_compiled_code(config: RunConfig) -> None:
    """Make the folder and point the libraries to it. Call this before they are imported. Child processes inherit it.

    Variables that the user has set stay as they are. Raises ConfigError if the folder cannot be made."""
    folder = config.cache_folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        close_to_others(folder)
    except OSError as error:
        reason = f"cache_dir {folder} cannot be made: {error.strerror}; set it to a writable folder"
        raise ConfigError(reason) from error
    for variable, name in VARIABLES.items():
        os.environ.setdefault(variable, str(folder / name))
