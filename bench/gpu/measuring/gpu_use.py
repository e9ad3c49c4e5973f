"""How busy the GPU is, as nvidia-smi says."""

from __future__ import annotations

import shutil
import subprocess
import threading
from types import TracebackType
from typing import Self

SAMPLE_S = 1.0


def gpu_use() -> tuple[float, float] | None:
    """Percent of the time in which the GPU was busy, and MB of its memory in use."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
        percent, used = (float(part) for part in text.splitlines()[0].split(","))
    except (subprocess.SubprocessError, ValueError, IndexError):
        return None
    return percent, used


class GpuSamples:
    """Samples the GPU once a second, in a thread, while the context is open. Without a GPU there are no samples."""

    def __init__(self) -> None:
        self.percent: list[float] = []
        self.used_mb: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(10)

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            used = gpu_use()
            if used is None:
                return
            self.percent.append(used[0])
            self.used_mb.append(used[1])
