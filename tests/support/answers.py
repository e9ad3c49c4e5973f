"""An engine's answers, put together from their chunks, and the log-probs that a constrained answer should have: those
of a forward pass whose logits xgrammar has masked. This does not need pytest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.trajectory import Sampling
from penstock_rollout.engines.engine import Engine, GenerateRequest, OutputConstraint, TokenChunk
from support.scripted_engines import END, OTHER_END, make_tokenizer_folder


@dataclass(frozen=True)
class Answer:
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str | None
    arrivals: tuple[float, ...] = ()
    """When each token arrived, if it was measured."""

    @classmethod
    def of(cls, prompt: tuple[int, ...], chunks: list[TokenChunk]) -> Answer:
        versions: list[int] = []
        for segment in (segment for chunk in chunks for segment in chunk.segments):
            assert segment.start == len(versions), "segments leave no gap and do not overlap"
            versions += [segment.policy_version] * (segment.end - segment.start)
        assert all(chunk.finish_reason is None for chunk in chunks[:-1])
        token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
        log_probs = tuple(log_prob for chunk in chunks for log_prob in chunk.log_probs)
        assert len(token_ids) == len(log_probs) == len(versions), "a token without its stamp"
        return cls(prompt, token_ids, log_probs, tuple(versions), chunks[-1].finish_reason)


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["sum", "list"]},
        "is_done": {"type": "boolean"},
        "digits": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3},
    },
    "required": ["kind", "is_done", "digits"],
    "additionalProperties": False,
}
CALL = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": '<tool_call>\n{"name": "add", "arguments": ',
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "}\n</tool_call>",
    },
}
CONSTRAINTS = {
    "json_schema": OutputConstraint("json_schema", json.dumps(SCHEMA)),
    "structural_tag": OutputConstraint("structural_tag", json.dumps(CALL)),
}


def write_model_with_text(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Write a random Qwen2 and a tokenizer that knows letters, digits and the signs of JSON. Returns the model, with
    the weights that were written, in float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    make_tokenizer_folder(folder)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"eos_token": "<|end|>"}))
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=END, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: Any = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = [END, OTHER_END]
    model.to(dtype).save_pretrained(folder)
    return Qwen2ForCausalLM.from_pretrained(folder, dtype="float32").eval()


@dataclass
class Reference:
    """What the engine should have reported, computed by transformers and xgrammar."""

    model: Any
    folder: Path
    any_whitespace: bool
    """Whether JSON may have white space anywhere (vLLM), or only as json.dumps writes it (torch)."""
    stop_ids: Sequence[int] = (END, OTHER_END)
    _grammars: dict[OutputConstraint, Any] = field(default_factory=dict)

    def log_probs(self, answer: Answer, constraint: OutputConstraint | None, temperature: float) -> torch.Tensor:
        """Those of the answer's tokens, after the mask and the temperature. Fails at a token that is masked."""
        ids = torch.tensor([answer.prompt + answer.token_ids])
        with torch.inference_mode():
            logits = self.model(ids).logits[0, len(answer.prompt) - 1 : -1]
        if constraint is not None:
            self._mask(logits, answer.token_ids, constraint)
        chosen = torch.tensor(answer.token_ids)[:, None]
        return (logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0]

    def _mask(self, logits: torch.Tensor, token_ids: Sequence[int], constraint: OutputConstraint) -> None:
        import xgrammar

        matcher = self._matcher(constraint)
        mask = xgrammar.allocate_token_bitmask(1, logits.shape[-1])
        for row, token_id in zip(logits, token_ids, strict=True):
            matcher.fill_next_token_bitmask(mask)
            xgrammar.apply_token_bitmask_inplace(row[None], mask)
            assert matcher.accept_token(token_id), f"token {token_id} is not in the grammar: {token_ids}"

    def _matcher(self, constraint: OutputConstraint) -> Any:
        import xgrammar

        if constraint not in self._grammars:
            self._grammars[constraint] = self._compiled(constraint)
        return xgrammar.GrammarMatcher(self._grammars[constraint])

    def _compiled(self, constraint: OutputConstraint) -> Any:
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self.model.config.vocab_size, stop_token_ids=list(self.stop_ids)
        )
        compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        if constraint.kind == "json_schema":
            return compiler.compile_json_schema(constraint.text, any_whitespace=self.any_whitespace)
        return compiler.compile_structural_tag(constraint.text)


async def constrained(
    engine: Engine, name: str, prompt: tuple[int, ...], sampling: Sampling, constraint: OutputConstraint
) -> Answer:
    request = GenerateRequest(name, prompt, sampling, stream=True, constraint=constraint)
    return Answer.of(prompt, [chunk async for chunk in engine.generate(request)])


def json_of(text: str, constraint: OutputConstraint) -> Any:
    """The JSON of an answer that ended by itself. Raises ValueError if it is none."""
    if constraint.kind == "json_schema":
        return json.loads(text)
    call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    return call["arguments"]


def fits_schema(value: Any) -> bool:
    is_whole = isinstance(value, dict) and set(value) == {"kind", "is_done", "digits"}
    return (
        is_whole
        and value["kind"] in ("sum", "list")
        and isinstance(value["is_done"], bool)
        and len(value["digits"]) <= 3
        and set(value["digits"]) <= {1, 2, 3}
    )
