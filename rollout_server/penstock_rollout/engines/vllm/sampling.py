"""The sampling parameters of a request, as vLLM takes them."""

from __future__ import annotations

from typing import Any

from penstock_rollout.engines.engine import GenerateRequest, OutputConstraint
from penstock_rollout.engines.vllm.start import CHUNK_TOKENS

MAX_CHUNK_TOKENS = 16
"""Most tokens that EngineCore keeps before it sends them. An interrupt loses those that it keeps."""


def sampling_params(request: GenerateRequest, stop_ids: list[int]) -> Any:
    """`stop_ids` end a response, unless the request ignores them.

    A constrained request also ends at the tokenizer's own end token. It is the only one that vLLM 0.26 lets a
    constrained text end with, and what follows the end is not constrained."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = request.sampling
    chunk_tokens = min(request.min_chunk_tokens, MAX_CHUNK_TOKENS) if request.stream else MAX_CHUNK_TOKENS
    chunks: dict[str, Any] = {}
    if request.min_chunk_tokens > 1 and hasattr(SamplingParams, "stream_interval"):
        chunks["stream_interval"] = request.min_chunk_tokens  # without it, each token is a chunk
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        seed=None if sampling.seed is None else sampling.seed % 2**63,  # vLLM reads -1 as "no seed"
        ignore_eos=request.constraint is None,
        stop_token_ids=[] if sampling.ignore_eos else stop_ids,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        extra_args={CHUNK_TOKENS: chunk_tokens} if chunk_tokens > 1 else None,
        structured_outputs=None if request.constraint is None else _structured_outputs(request.constraint),
        **chunks,
    )


def _structured_outputs(constraint: OutputConstraint) -> Any:
    """vLLM masks the logits before anything else, so that the processed log-probs are those of what may be sampled."""
    from vllm.sampling_params import StructuredOutputsParams

    if constraint.kind == "json_schema":
        return StructuredOutputsParams(json=constraint.text)
    if constraint.kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(structural_tag=constraint.text)
