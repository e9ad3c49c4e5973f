"""Checks constrained output, tool calls and interrupts of vLLM on a GPU, or of its CPU build.

    PYTHONPATH=.:rollout_server:tests:bench python bench/gpu/constrained_check.py

It needs torch, transformers and vLLM with xgrammar, but neither Redis nor Ray. A tiny random model is written and
served in bf16 (float32 on a CPU). Answers are constrained to a JSON schema and to Hermes calls of a tool. Their
log-probs are compared with a forward pass of transformers in float32 over the same weights, whose logits xgrammar
masks. The difference is judged relative to that of the same forward pass without the mask, which is what an engine
would report whose log-probs leave the constraint out.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_check import engine_version, say
from harness import Bar, Measurement, report
from penstock.config.rollout import EngineConfig
from penstock.protocols.conversation import Conversation, Message
from penstock.trajectory import Sampling
from penstock.v1 import generate_pb2
from penstock_rollout.engines.engine import Engine, GenerateRequest, OutputConstraint, TokenChunk
from penstock_rollout.engines.factory import create_engine
from penstock_rollout.engines.vllm.start import is_cpu_build
from penstock_rollout.serving.generate_service import StreamedText
from penstock_rollout.serving.tool_calling import ToolCalling
from penstock_rollout.tokenization import Tokenization
from support.answers import (
    CONSTRAINTS,
    SCHEMA,
    Answer,
    Reference,
    constrained,
    fits_schema,
    json_of,
    write_model_with_text,
)
from support.scripted_engines import END, OTHER_END

DEADLINE_S = 140.0
NUM_ANSWERS = 16
MAX_SHARE_OF_UNMASKED = 0.02
MAX_TOKENS = 400
SAMPLINGS = (Sampling(max_tokens=MAX_TOKENS), Sampling(0.7, max_tokens=MAX_TOKENS, seed=3))
TOOLS = (
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "sub", "parameters": SCHEMA}},
)
WRITTEN = 'so: <tool_call>\n{"name": "add", "arguments": {"kind": "sum"}}\n</tool_call>'


class Check:
    """One engine from its first answer to its last."""

    def __init__(self, engine: Engine, reference: Reference) -> None:
        self.engine = engine
        self.reference = reference
        self.tokenization = Tokenization(reference.folder)
        self.measurements: list[Measurement] = []
        self.bars: list[Bar] = []

    async def run(self) -> None:
        for kind in CONSTRAINTS:
            await self._constrained(kind)
        self._written_call()
        for stream in (False, True):
            await self._forced_calls(stream)
        for constraint in (None, CONSTRAINTS["json_schema"]):
            await self._interrupt(constraint)

    async def _constrained(self, kind: str) -> None:
        """Answers end by themselves, fit the schema, and have the log-probs of the masked distribution."""
        constraint = CONSTRAINTS[kind]
        unfit, errors, shifts = 0, [], []
        for sampling in SAMPLINGS:
            asked = (
                constrained(self.engine, f"{kind}-{sampling.temperature}-{n}", (20, 21, 30 + n), sampling, constraint)
                for n in range(NUM_ANSWERS)
            )
            for answer in await asyncio.gather(*asked):
                fits = answer.finish_reason == "stop" and fits_schema(json_of(self._text(answer), constraint))
                unfit += not fits
                masked = self.reference.log_probs(answer, constraint, sampling.temperature)
                plain = self.reference.log_probs(answer, None, sampling.temperature)
                for found, right, other in zip(answer.log_probs, masked.tolist(), plain.tolist(), strict=True):
                    errors.append(abs(found - right))
                    shifts.append(abs(other - right))
        self._measure(f"{kind}: mean error of log-probs", "nats", sum(errors) / len(errors))
        self._measure(f"{kind}: difference that the mask makes", "nats", sum(shifts) / len(shifts))
        self._bar(f"{kind}: answers that do not fit the schema", unfit, 0)
        self._bar(f"{kind}: error / difference that the mask makes", sum(errors) / sum(shifts), MAX_SHARE_OF_UNMASKED)

    def _written_call(self) -> None:
        """vLLM's own parser reads a Hermes call that is written out, at once and piece by piece."""
        conversation = Conversation((Message("user", "hi"),), tools=TOOLS)
        wrong = 0
        for stream in (False, True):
            reader = self._calling().reader(conversation, stream=stream)
            ids = self.tokenization.text_ids(WRITTEN)
            streamed = StreamedText(self.tokenization.raw_text, ())
            parts: list[Any] = []
            content = ""
            for index, token_id in enumerate(ids):
                is_last = index == len(ids) - 1
                read = reader.add(streamed.add((token_id,), is_last), (token_id,), is_last)
                parts += read.tool_calls
                content += read.content
            found = (content.strip(), "".join(part.name for part in parts), "".join(part.arguments for part in parts))
            say(f"vLLM's hermes parser, {stream=}: {found}")
            wrong += found != ("so:", "add", '{"kind": "sum"}')
        self._bar("written calls that are read wrongly", wrong, 0)

    async def _forced_calls(self, stream: bool) -> None:
        """With `tool_choice: required` every answer is a call of a tool, which vLLM's own parser reads."""
        request = generate_pb2.GenerateRequest(
            tool_choice=generate_pb2.TOOL_CHOICE_REQUIRED, single_tool_call=True, stream=stream
        )
        conversation = Conversation(
            (Message("user", "hi"),), tools=TOOLS, tool_choice=request.tool_choice, single_tool_call=True
        )
        calling = self._calling()
        constraint = calling.constraint(request, conversation)
        assert constraint is not None

        async def is_right(number: int) -> bool:
            reader = calling.reader(conversation, stream=stream)
            streamed = StreamedText(self.tokenization.raw_text, ())
            parts: list[Any] = []
            wanted = GenerateRequest(
                f"forced-{stream}-{number}", (20, 30 + number), SAMPLINGS[0], stream=stream, constraint=constraint
            )
            async for chunk in self.engine.generate(wanted):
                is_last = chunk.finish_reason is not None
                parts += reader.add(streamed.add(chunk.token_ids, is_last), chunk.token_ids, is_last).tool_calls
            return self._is_one_call(parts)

        right = await asyncio.gather(*(is_right(number) for number in range(NUM_ANSWERS)))
        self._bar(f"forced calls that are none, {'streamed' if stream else 'at once'}", right.count(False), 0)

    def _is_one_call(self, parts: Sequence[Any]) -> bool:
        names = [part.name for part in parts if part.name]
        arguments = "".join(part.arguments for part in parts)
        try:
            return len(names) == 1 and names[0] in ("add", "sub") and fits_schema(json.loads(arguments))
        except ValueError:
            say(f"not a call: {names} {arguments!r}")
            return False

    async def _interrupt(self, constraint: OutputConstraint | None) -> None:
        """An interrupted request hands over what it has, and the next request is served."""
        name = "interrupt" if constraint is None else "constrained interrupt"
        sampling = Sampling(max_tokens=MAX_TOKENS, ignore_eos=constraint is None)
        request = GenerateRequest(name, (20, 21, 22), sampling, stream=True, constraint=constraint)
        chunks: list[TokenChunk] = []
        async for chunk in self.engine.generate(request):
            chunks.append(chunk)
            if len(chunks) == 3:
                await self.engine.interrupt([name, "unknown"])
        answer = Answer.of(request.prompt_token_ids, chunks)
        is_right = answer.finish_reason == "aborted" and 3 <= len(answer.token_ids) < MAX_TOKENS
        say(f"{name}: {answer.finish_reason} after {len(answer.token_ids)} tokens")
        self._bar(f"{name}: requests that did not end as aborted", not is_right, 0)
        error = (self.reference.log_probs(answer, constraint, 1.0) - _tensor(answer.log_probs)).abs().mean()
        self._measure(f"{name}: mean error of log-probs", "nats", float(error))
        again = await constrained(self.engine, name, (20,), Sampling(max_tokens=4), CONSTRAINTS["json_schema"])
        self._bar(f"{name}: tokens of the next request", len(again.token_ids), 4, at_most=False)

    def _calling(self) -> ToolCalling:
        return ToolCalling("hermes", self.tokenization, is_vllm=True)

    def _text(self, answer: Answer) -> str:
        return self.tokenization.raw_text([i for i in answer.token_ids if i not in self.tokenization.stop_ids])

    def _measure(self, name: str, unit: str, value: float) -> None:
        self.measurements.append(Measurement(name, unit, [value]))

    def _bar(self, name: str, value: float, goal: float, *, at_most: bool = True) -> None:
        self.bars.append(Bar(name, float(value), goal, at_most))


def _tensor(values: Sequence[float]) -> Any:
    import torch

    return torch.tensor(values)


def ends_of_vllm() -> tuple[int, ...]:
    """The tokens that may end a constrained text. vLLM 0.26 takes the tokenizer's end token alone."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    takes_stops = "stop_token_ids" in inspect.signature(XgrammarBackend.compile_grammar).parameters
    return (END, OTHER_END) if takes_stops else (END,)


async def check(folder: Path, found: list[Check]) -> None:
    import torch

    is_gpu = torch.cuda.is_available()
    dtype = "bfloat16" if is_gpu else "float32"
    model = write_model_with_text(folder, getattr(torch, dtype))
    config = EngineConfig(
        name="vllm", max_model_len=512, max_num_seqs=32, gpu_memory_utilization=0.2, enforce_eager=True
    )
    engine = create_engine(config, folder, dtype, seed=0)
    say(f"starting {engine_version('vllm')} in {dtype}")
    started = time.monotonic()
    await engine.start(policy_version=0)
    say(f"the engine is ready after {time.monotonic() - started:.0f} s")
    try:
        found.append(Check(engine, Reference(model, folder, any_whitespace=True, stop_ids=ends_of_vllm())))
        await found[0].run()
    finally:
        await engine.stop()


async def main_async() -> int:
    found: list[Check] = []
    failure = ""
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await check(Path(folder), found)
        except TimeoutError:
            failure = f"it did not end within {DEADLINE_S:.0f} s"
        except Exception as error:
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
    bars = [bar for one in found for bar in one.bars]
    bars.append(Bar("checks that did not end", float(bool(failure)), 0, True))
    title = f"constrained output, {engine_version('vllm')}"
    name = f"constrained_check_{'cpu' if is_cpu_build() else 'gpu'}"
    ok = report(name, title, [m for one in found for m in one.measurements], bars)
    say(failure or "done")
    return 0 if ok else 1


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    os._exit(asyncio.run(main_async()))  # a start that hangs in its thread would keep the interpreter alive
