"""A taskset of verifiers: sums of two numbers."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        for first in range(2, 6):
            yield SumTask(SumData(prompt=f"{first} + 4 =", answer=str(first + 4)), self.config.task)


__all__ = ["Sums"]
