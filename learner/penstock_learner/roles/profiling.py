"""Where profiles of ranks go, and how nsys starts the ranks that Nsight records (`learner.profile`)."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from penstock.config.learner import LearnerConfig, RoleConfig
from penstock.config.run import RunConfig
from penstock.errors import ConfigError

NSYS_OPTIONS = (
    "--trace=cuda,nvtx,cublas,cudnn", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true",
    "--capture-range=cudaProfilerApi", "--capture-range-end=repeat", "--kill=none",
)  # fmt: skip
"""A report is written whenever a capture ends, and the rank goes on."""


def profiles_folder(config: RunConfig) -> Path:
    """Profiles of the ranks, and Ray's timeline. If one cannot be written, the log says so and training continues."""
    return config.folder / "profiles"


def check_profiler(learner: LearnerConfig) -> None:
    """Raise ConfigError if Nsight cannot record the ranks."""
    if learner.profile.tool != "nsight" or not learner.profile.steps:
        return
    if not any(role.gpus_per_rank for role in learner.needed_roles.values()):
        raise ConfigError("learner.profile.tool nsight records GPUs, and no rank has one (gpus_per_rank); use torch")
    if shutil.which("nsys") is None:
        raise ConfigError(
            "learner.profile.tool is nsight, but there is no program nsys on the PATH; install Nsight Systems on every "
            "machine with ranks, or use torch"
        )


def runtime_environment(config: RunConfig, name: str, role: RoleConfig, rank: int) -> dict[str, Any]:
    """What Ray's options need so that nsys starts a rank that it records; empty for others.

    Ray's own `nsight` starts the `python` of the PATH, and mixes up the options of ranks that start at once."""
    profile = config.learner.profile
    if profile.tool != "nsight" or not profile.steps or rank not in profile.ranks or not role.gpus_per_rank:
        return {}
    folder = profiles_folder(config).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    command = ["nsys", "profile", *NSYS_OPTIONS, f"--output={folder}/nsight-{name}-{rank}-%p", sys.executable]
    return {"runtime_env": {"py_executable": shlex.join(command)}}
