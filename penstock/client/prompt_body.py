"""A prompt as the REST interface takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.trajectory import Prompt, Sampling


def prompt_body(prompt: Prompt) -> dict[str, Any]:
    body: dict[str, Any] = {
        "sampling": {
            "temperature": prompt.sampling.temperature,
            "top_p": prompt.sampling.top_p,
            "max_tokens": prompt.sampling.max_tokens,
            "seed": prompt.sampling.seed,
            **_further(prompt.sampling),
        },
        "num_samples": prompt.num_samples,
        "agent_name": prompt.agent_name,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
        "priority": prompt.priority,
    }
    if prompt.messages:
        body["messages"] = prompt.chat
    if prompt.token_ids:
        body["token_ids"] = list(prompt.token_ids)
    return body


def _further(sampling: Sampling) -> dict[str, Any]:
    """The parameters that are given and are not the default."""
    given = {
        "top_k": sampling.top_k, "min_p": sampling.min_p, "ignore_eos": sampling.ignore_eos, "stop": list(sampling.stop)
    }  # fmt: skip
    return {name: value for name, value in given.items() if value}
