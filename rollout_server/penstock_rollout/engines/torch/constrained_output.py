"""Constrained output of the torch engine, with xgrammar: which tokens a row may sample next."""

from __future__ import annotations

import importlib.util
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.errors import InvalidInput
from penstock.weights.folder_tensors import stop_token_ids
from penstock_rollout.engines.engine import OutputConstraint


class RowConstraint:
    """The constraint of one row, at the place that its response has reached."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        import xgrammar

        self._matcher = matcher
        self._mask: torch.Tensor = xgrammar.allocate_token_bitmask(1, vocab_size)

    def apply(self, logits: torch.Tensor) -> None:
        """Set the logits [vocabulary] of tokens that may not come next to minus infinity, in place."""
        import xgrammar

        if self._matcher.fill_next_token_bitmask(self._mask):
            xgrammar.apply_token_bitmask_inplace(logits[None], self._mask.to(logits.device))

    def accept(self, token_id: int) -> None:
        accepted = self._matcher.accept_token(token_id)
        assert accepted, f"token {token_id} was sampled against the constraint"


@dataclass(eq=False)
class ConstraintCompiler:
    """Compiles constraints for one tokenizer. xgrammar keeps those that it has compiled."""

    model_path: Path
    vocab_size: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _compiler: Any = None

    def compile(self, constraint: OutputConstraint) -> RowConstraint:
        """Blocks while the grammar is compiled. Raises InvalidInput for a schema that xgrammar does not understand."""
        if importlib.util.find_spec("xgrammar") is None:
            raise InvalidInput("response_format", "the torch engine needs xgrammar to constrain its output; install it")
        import xgrammar

        with self._lock:
            compiler = self._compiler = self._compiler or self._create()
            try:
                if constraint.kind == "structural_tag":
                    grammar = compiler.compile_structural_tag(constraint.text)
                else:
                    schema = constraint.text if constraint.kind == "json_schema" else '{"type": "object"}'
                    grammar = compiler.compile_json_schema(schema, any_whitespace=False)
            except Exception as error:  # xgrammar raises errors of several kinds, some of its own
                why = " ".join(str(error).split())[:200]
                raise InvalidInput("response_format", f"the schema cannot be used: {why}") from error
        return RowConstraint(xgrammar.GrammarMatcher(grammar), self.vocab_size)

    def _create(self) -> Any:
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model_path, local_files_only=True)
        stop_ids = list(stop_token_ids(self.model_path))
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self.vocab_size, stop_token_ids=stop_ids or None
        )
        return xgrammar.GrammarCompiler(info, max_threads=1)
