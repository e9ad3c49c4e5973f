"""Imports modules of ours that need vLLM where it is not installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest


@contextmanager
def imported_core(monkeypatch: pytest.MonkeyPatch, **values: Any) -> Iterator[Any]:
    """The module of vLLM's processes, imported anew with these values instead of vLLM's own. What is not given is an
    empty class. Afterwards it is as if it had not been imported."""
    ours, model = "penstock_rollout.engines.vllm.core", "vllm.model_executor"
    names = {
        "vllm": [], "vllm.v1": [], "vllm.v1.executor": [], "vllm.v1.core": [], "vllm.v1.core.sched": [],
        model: [], f"{model}.layers": [], f"{model}.model_loader": [],
        "vllm.v1.engine": ["EngineCoreOutput", "EngineCoreOutputs", "EngineCoreRequestType"],
        "vllm.v1.request": ["RequestStatus"],
        "vllm.v1.core.sched.scheduler": ["Scheduler"],
        "vllm.v1.core.sched.async_scheduler": ["AsyncScheduler"],
        "vllm.v1.core.sched.interface": ["PauseState"],
        "vllm.config": ["set_current_vllm_config"],
        f"{model}.model_loader.reload": ["initialize_layerwise_reload", "finalize_layerwise_reload"],
        f"{model}.layers.attention": ["Attention"],
        f"{model}.layers.linear": ["UnquantizedLinearMethod"],
        f"{model}.layers.vocab_parallel_embedding": ["UnquantizedEmbeddingMethod"],
        "vllm.v1.executor.multiproc_executor": ["MultiprocExecutor"],
        "vllm.v1.executor.uniproc_executor": ["UniProcExecutor"],
    }  # fmt: skip
    for name, contents in names.items():
        module = ModuleType(name)
        vars(module).update({value: values.get(value, type(value, (), {})) for value in contents})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, ours, raising=False)
    yield importlib.import_module(ours)
    sys.modules.pop(ours, None)
