"""vLLM loads a folder of `penstock export` and generates the same text as the checkpoint's model."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from penstock.cli.main import main as cli
from penstock.config.run import RunConfig
from support.learner_runs import NUM_STEPS, checkpoint_state, fill_queue, make_config, run_learner
from support.redis_server import RedisProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
PROMPTS = [[5, 6, 7], [11, 12, 13, 14], [60], [33, 2, 33, 2, 33]]
NUM_TOKENS = 16
LORA = {"rank": 4, "alpha": 16}
GREEDY = """
import asyncio, json, sys
from pathlib import Path
from penstock.config.rollout import EngineConfig
from penstock.trajectory import Sampling
from penstock_rollout.engines.factory import create_engine
from penstock_rollout.engines.engine import GenerateRequest

async def main(folder, prompts, num_tokens):
    engine = create_engine(EngineConfig(name="vllm", max_model_len=64), Path(folder), "float32", 0)
    await engine.start(policy_version=0)
    sampling, answers = Sampling(temperature=0.0, max_tokens=num_tokens), []
    for number, prompt in enumerate(prompts):
        request = GenerateRequest(str(number), tuple(prompt), sampling)
        answers.append([token async for chunk in engine.generate(request) for token in chunk.token_ids])
    await engine.stop()
    print("ANSWERS", json.dumps(answers))

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])))
"""
"""Runs in a process of its own: vLLM forks its engine, which fails in a process with torch's threads."""


@pytest.mark.parametrize("learner", [{}, {"lora": LORA, "lr": 0.05}], ids=["whole", "adapter"])
def test_vllm_serves_the_exported_checkpoint(
    learner: dict[str, Any], tmp_path: Path, tiny_models: dict[str, Path], redis_process: RedisProcess
) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    config = make_config(
        tmp_path, tiny_models["policy"], redis_process.url, f"export-{len(learner)}", policy={"num_ranks": 2}, **learner
    )
    asyncio.run(fill_queue(config))
    code, output = run_learner(config)
    assert code == 0, output[-3000:]
    out = tmp_path / "out"
    assert cli(["export", "--config", str(config.folder / "config.yaml"), "--out", str(out)]) == 0
    expected = greedy(checkpoint_model(config))
    assert expected != greedy(AutoModelForCausalLM.from_pretrained(config.model.path)), "training changed no answer"
    assert vllm_greedy(tmp_path, out) == expected
    if "lora" in learner:
        words = ["export", "--config", str(config.folder / "config.yaml"), "--out", str(tmp_path / "adapter")]
        assert cli([*words, "--adapter"]) == 0
        base = AutoModelForCausalLM.from_pretrained(config.model.path)
        assert greedy(PeftModel.from_pretrained(base, str(tmp_path / "adapter"))) == expected


def checkpoint_model(config: RunConfig) -> Any:
    """The policy of the last checkpoint, assembled without `penstock export`. An adapter is added as its product."""
    folder = config.folder / "checkpoints" / f"term-000001-step-{NUM_STEPS:08d}"
    named = checkpoint_state(folder)["model"].items()
    weights = {name.removeprefix("lm.").replace(".base_layer.", "."): weight for name, weight in named}
    lm: Any = AutoModelForCausalLM.from_pretrained(config.model.path)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            parameter.copy_(weights[name])
            first, second = (weights.get(name.replace("weight", f"lora_{part}.default.weight")) for part in "AB")
            if name.endswith(".weight") and first is not None:
                parameter.add_(LORA["alpha"] / LORA["rank"] * second @ first)
    return lm


def greedy(lm: Any) -> list[list[int]]:
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        generated = lm.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0
        )
        answers.append(generated[0, len(prompt) :].tolist())
    return answers


def vllm_greedy(folder: Path, model: Path) -> list[list[int]]:
    script = folder / "greedy.py"
    script.write_text(GREEDY)
    command = [sys.executable, str(script), str(model), json.dumps(PROMPTS), str(NUM_TOKENS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("ANSWERS ")]
    answers: list[list[int]] = json.loads(line.removeprefix("ANSWERS "))
    return answers
