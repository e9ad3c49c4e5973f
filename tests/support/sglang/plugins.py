"""SGLang's plugin framework, for the stand-in: it finds plugins by their metadata and applies their hooks.

The stand-in has the two methods that schema.json lists under `hooks`. A hook of any other method is refused.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

GROUP = "sglang.srt.plugins"
SCHEDULER, WEIGHTS = json.loads((Path(__file__).parent / "schema.json").read_text())["hooks"]


class HookType(enum.Enum):
    AFTER = "after"
    AROUND = "around"


class Plugins:
    """The plugins of one process."""

    def __init__(self) -> None:
        self._hooks: dict[tuple[str, HookType], Callable[..., Any]] = {}
        registry: Any = ModuleType(f"{GROUP}.hook_registry")
        registry.HookRegistry, registry.HookType = SimpleNamespace(register=self._register), HookType
        for name in ("sglang", "sglang.srt", GROUP):
            sys.modules[name] = ModuleType(name)
        sys.modules[registry.__name__] = registry
        for plugin in entry_points(group=GROUP):
            plugin.load()()

    def _register(self, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        assert target in (SCHEDULER, WEIGHTS), f"SGLang has no {target}"
        self._hooks[target, hook_type] = hook

    def scheduler_is_made(self, model_folder: Path) -> None:
        """Call what runs after Scheduler.__init__, with the fields that SGLang's scheduler has then."""
        updater = SimpleNamespace(tp_rank=0, device="cpu", gpu_id=0)
        scheduler = SimpleNamespace(
            server_args=SimpleNamespace(model_path=str(model_folder)),
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(weight_updater=updater)),
        )
        if hook := self._hooks.get((SCHEDULER, HookType.AFTER)):
            hook(None, scheduler, None, None)

    def weights_of(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the weights that an update from this folder loads."""
        source = SimpleNamespace(model_or_path=str(folder))
        if hook := self._hooks.get((WEIGHTS, HookType.AROUND)):
            found: Iterator[tuple[str, torch.Tensor]] = hook(_read_files, None, source)
            return found
        return _read_files(None, source)


def _read_files(loader: None, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(Path(source.model_or_path).glob("*.safetensors")):
        yield from load_file(file).items()
