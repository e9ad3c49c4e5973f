"""Torch engines whose weights are not what they say: for tests of the learner's check."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from penstock_rollout import __main__ as rollout_process
from penstock_rollout import server as rollout_server
from penstock_rollout.engines.torch.engine import TorchEngine
from penstock_rollout.weights.stage import WeightStage

Fault = Literal["frozen", "layer", "stale_kv"]
"""`frozen` loads nothing of an update, as if an adapter never arrived. `layer` leaves one layer out. `stale_kv` answers
a prompt that it has seen with the KV of the version that saw it first."""


class FaultyEngine(TorchEngine):
    """Reports the version and the digest of every update, whatever it does with it. `is_faulty` says whether the fault
    happens now."""

    fault: Fault = "frozen"
    is_faulty: Callable[[], bool] = staticmethod(lambda: True)

    def _flip(self, stage: WeightStage, digest: str) -> float:
        if not self.is_faulty() or self.fault == "stale_kv":
            if not self.is_faulty() and isinstance(self._batch._model, RememberingModel):
                self._batch._model.seen.clear()
            return super()._flip(stage, digest)
        with _without(stage, "" if self.fault == "frozen" else "layers.0."):
            return super()._flip(stage, digest)

    async def start(self, policy_version: int) -> None:
        await super().start(policy_version)
        if self.fault == "stale_kv":
            self._batch._model = RememberingModel(self._model, self.is_faulty)


@contextmanager
def _without(stage: WeightStage, part_of_name: str) -> Iterator[None]:
    """The stage without the tensors whose name has this part."""
    tensors = stage._tensors
    stage._tensors = [(name, tensor) for name, tensor in tensors if part_of_name not in name]
    yield
    stage._tensors = tensors


class RememberingModel:
    """A model that keeps the KV of each prompt for ever, as an engine would whose prefix cache survives an update."""

    def __init__(self, model: Any, is_faulty: Callable[[], bool]) -> None:
        self.model = model
        self.is_faulty = is_faulty
        self.seen: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *, input_ids: torch.Tensor, past_key_values: Any, **options: Any) -> Any:
        is_prefill = "logits_to_keep" in options
        if not is_prefill or not self.is_faulty():
            return self.model(input_ids=input_ids, past_key_values=past_key_values, **options)
        rows = [tuple(row) for row in input_ids.tolist()]
        if not all(row in self.seen for row in rows):
            output = self.model(input_ids=input_ids, past_key_values=past_key_values, **options)
            for index, row in enumerate(rows):
                layers = past_key_values.layers
                self.seen[row] = [(layer.keys[index].clone(), layer.values[index].clone()) for layer in layers]
            return output
        for number, layers in enumerate(zip(*(self.seen[row] for row in rows), strict=True)):
            keys, values = (torch.stack(part)[:, :, :-1] for part in zip(*layers, strict=True))
            past_key_values.update(keys, values, number)
        return self.model(input_ids=input_ids[:, -1:], past_key_values=past_key_values, **options)


KIND = "FAULTY_KIND"
FILE = "FAULTY_FILE"


def create_engine(config: Any, model_path: Path, dtype: str, seed: int, **_: Any) -> FaultyEngine:
    engine = FaultyEngine(config, model_path, dtype, seed)
    engine.fault = os.environ.get(KIND, "frozen")  # type: ignore[assignment]
    engine.is_faulty = Path(os.environ.get(FILE, "/nonexistent")).exists
    return engine


def main() -> int:
    rollout_server.create_engine = create_engine  # type: ignore[assignment]
    return rollout_process.main()


if __name__ == "__main__":
    raise SystemExit(main())
