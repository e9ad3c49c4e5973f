"""A plugin of SGLang that receives weights in its scheduler processes, and loads them at a flip.

Only the SGLang that a rollout server starts has it: `announce_plugin` writes the metadata by which SGLang finds it into
a private folder, which is on the PYTHONPATH of that server alone. The plugin has two hooks:

| hook                                      | effect                                                                   |
|-------------------------------------------|--------------------------------------------------------------------------|
| after Scheduler.__init__                  | a StageWorker answers calls on a socket in the private folder            |
| around DefaultModelLoader._get_weights... | a load of PRIVATE_FOLDER/VERSION gets that version's verified stage      |

So everything else of an update is SGLang's: the pause, the load itself, the version of tokens, the flush of the cache.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from penstock_rollout.engines.sglang.stage_socket import serve_stage, socket_path
from penstock_rollout.engines.sglang.stage_worker import StageWorker

FOLDER_VARIABLE = "PENSTOCK_SGLANG_FOLDER"
NAME = "penstock"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"
WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator"

_workers: list[StageWorker] = []
"""The receiver of this process, if it is a scheduler."""


def announce_plugin(folder: Path) -> dict[str, str]:
    """Write the plugin's metadata into the private folder. Returns the environment with which SGLang finds it."""
    metadata = folder / "penstock_sglang-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-sglang\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{NAME} = {__name__}:register\n")
    found = {FOLDER_VARIABLE: str(folder), "PYTHONPATH": _joined(os.pathsep, str(folder), "PYTHONPATH")}
    if os.environ.get("SGLANG_PLUGINS"):  # a list of the plugins that are loaded; without it, all are
        found["SGLANG_PLUGINS"] = _joined(",", NAME, "SGLANG_PLUGINS")
    return found


def _joined(separator: str, first: str, variable: str) -> str:
    return separator.join([first, *filter(None, [os.environ.get(variable)])])


def register() -> None:
    """Register the hooks. SGLang calls it in every one of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(SCHEDULER, start_worker, HookType.AFTER)
    HookRegistry.register(WEIGHTS, staged_or_files, HookType.AROUND)


def start_worker(result: None, scheduler: Any, *arguments: Any, **named: Any) -> None:
    updater = scheduler.tp_worker.model_runner.weight_updater
    device = torch.device("cuda", updater.gpu_id) if updater.device == "cuda" else torch.device("cpu")
    _workers.append(StageWorker(Path(scheduler.server_args.model_path), updater.tp_rank, device))
    serve_stage(socket_path(Path(os.environ[FOLDER_VARIABLE]), updater.tp_rank), _workers[-1])


def staged_or_files(original: Any, loader: Any, source: Any, *arguments: Any, **named: Any) -> Any:
    path = Path(source.model_or_path)
    if path.parent != Path(os.environ[FOLDER_VARIABLE]):
        return original(loader, source, *arguments, **named)
    return _workers[-1].tensors(int(path.name))
