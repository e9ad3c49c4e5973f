"""Imports modules of ours that need vLLM where it is not installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import pytest


@contextmanager
def imported_beside(
    monkeypatch: pytest.MonkeyPatch, ours: str, contents: Mapping[str, Mapping[str, Any]]
) -> Iterator[Any]:
    """The module `ours`, imported anew while vLLM consists of `contents`: the names in each of its modules. Afterwards
    it is as if it had not been imported."""
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, ours, raising=False)
    yield importlib.import_module(ours)
    sys.modules.pop(ours, None)


def imported_worker(monkeypatch: pytest.MonkeyPatch, **values: Any) -> AbstractContextManager[Any]:
    """The module of vLLM's processes, with these values instead of vLLM's own. What is not given is `object`."""
    model = "vllm.model_executor"
    names = {
        "vllm": [], "vllm.v1": [], "vllm.v1.executor": [],
        model: [], f"{model}.layers": [], f"{model}.model_loader": [],
        "vllm.v1.engine": ["EngineCoreOutput", "EngineCoreOutputs", "EngineCoreRequestType"],
        "vllm.config": ["set_current_vllm_config"],
        f"{model}.model_loader.reload": ["initialize_layerwise_reload", "finalize_layerwise_reload"],
        f"{model}.layers.attention": ["Attention"],
        f"{model}.layers.linear": ["UnquantizedLinearMethod"],
        f"{model}.layers.vocab_parallel_embedding": ["UnquantizedEmbeddingMethod"],
        "vllm.v1.executor.multiproc_executor": ["MultiprocExecutor"],
        "vllm.v1.executor.uniproc_executor": ["UniProcExecutor"],
    }  # fmt: skip
    contents = {module: {name: values.get(name, object) for name in of_module} for module, of_module in names.items()}
    return imported_beside(monkeypatch, "penstock_rollout.engines.vllm.worker", contents)
