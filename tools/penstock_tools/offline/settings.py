"""The settings that determine the answers of a generation. An output file never mixes answers of different settings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.codec import encode_prompt
from penstock.config.run import RunConfig
from penstock.trajectory import Prompt, Sampling


def describe_settings(config: RunConfig, file: Path, prompts: Sequence[Prompt], *, scored: bool) -> dict[str, str]:
    """Settings by name. The same command on the same files gives the same settings."""
    digest = hashlib.sha256()
    for prompt in prompts:
        encoded = encode_prompt(replace(prompt, sampling=Sampling(), num_samples=1))
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    sampling, engine = prompts[0].sampling, config.rollout.engine
    return {
        "prompts": f"{file.name}, {len(prompts)} prompts, sha256 {digest.hexdigest()[:16]}",
        "model": str(config.model.path.resolve()),
        "dtype": config.model.dtype,
        "engine": f"{engine.name}, max_model_len {engine.max_model_len}, quantization {engine.quantization}",
        "prompt": f"max_tokens {config.rollout.prompt.max_tokens}, overlong {config.rollout.prompt.overlong}",
        "sampling": f"n {prompts[0].num_samples}, temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, "
        f"max_tokens {sampling.max_tokens}, seed {sampling.seed}{_further(sampling)}",
        "agents": hashlib.sha256(config.rollout.agents.model_dump_json().encode()).hexdigest()[:16],
        "rewards": hashlib.sha256(config.rollout.reward.model_dump_json().encode()).hexdigest()[:16] if scored else "",
    }


def _further(sampling: Sampling) -> str:
    """The parameters that are seldom given, if they are."""
    given = {"top_k": sampling.top_k, "min_p": sampling.min_p, "ignore_eos": sampling.ignore_eos, "stop": sampling.stop}
    return "".join(f", {name} {value}" for name, value in given.items() if value)
