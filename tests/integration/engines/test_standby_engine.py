"""vLLM whose EngineCore was a standby process: it answers as any other, and ends with a killed server."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_rollout.engines.vllm.standby import SWITCH
from support.processes import is_running, until
from support.tiny_models import make_tiny_qwen2

SERVER = """
import asyncio, json, sys
from pathlib import Path
from penstock.config.rollout import EngineConfig
from penstock.trajectory import Sampling
from penstock_rollout.engines.engine import GenerateRequest
from penstock_rollout.engines.factory import create_engine

async def main():
    engine = create_engine(EngineConfig(name="vllm", max_model_len=64), Path(sys.argv[1]), "float32", 0)
    standby = engine._standby.process.pid
    await engine.start(policy_version=3)
    request = GenerateRequest("one", (5, 6, 7), Sampling(temperature=0.0, max_tokens=8))
    tokens = [token async for chunk in engine.generate(request) for token in chunk.token_ids]
    core = engine._llm.engine_core.resources.engine_manager.processes[0].pid
    print("said", json.dumps({"standby": standby, "core": core, "tokens": len(tokens)}), flush=True)
    if sys.argv[2] == "stop":
        await engine.stop()
    else:
        await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", [pytest.param("stop", marks=pytest.mark.long), "kill"])
def test_engine_core_is_the_standby_process_and_ends_with_the_server(end: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    make_tiny_qwen2(tmp_path / "model", seed=0)
    script, cache = tmp_path / "server.py", tmp_path / "cache"
    script.write_text(SERVER)
    variables = os.environ | {SWITCH: "1", "VLLM_CACHE_ROOT": str(cache)}
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, str(script), str(tmp_path / "model"), end]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=variables, text=True)
        assert server.stdout is not None
        lines = (line for line in server.stdout if line.startswith("said "))
        try:
            said = json.loads(next(lines, "said {}").removeprefix("said "))
            assert said, (tmp_path / "log").read_text()
            assert said["core"] == said["standby"] and said["tokens"] > 0
            if end == "stop":
                assert server.wait(120) == 0, (tmp_path / "log").read_text()
        finally:
            server.send_signal(signal.SIGKILL)
            server.communicate(timeout=120)
    until(lambda: not is_running(said["core"]), "the end of EngineCore")
    assert "takes longer" not in (tmp_path / "log").read_text()
    assert list(cache.glob("modelinfos/*Qwen2ForCausalLM.json")), "the server's vLLM found the class there"
