"""Pushes by cuda_ipc and nccl into vLLM and SGLang while they decode on the same GPU.

On a GPU, with the engine installed: `python -m pytest tests/gpu/test_engines_on_cuda.py -k sglang`. The publisher lives
in the test's process. It shares the GPU with the engine, and both say that they are hosts of their own.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from prometheus_client import CollectorRegistry

from penstock.config.loading import validate
from penstock.config.rollout import EngineConfig
from penstock.config.run import RunConfig
from penstock.internal_calls import ClusterKey
from penstock.trajectory import Sampling
from penstock.v1 import weights_pb2_grpc
from penstock.weights.transports import has_cupy, host_id
from penstock_learner.weights.publisher import WeightPublisher
from penstock_learner.weights.senders import PushTarget
from penstock_rollout.engines.engine import Engine, GenerateRequest
from penstock_rollout.engines.factory import create_engine
from penstock_rollout.fleet.membership import WeightMember, available_transports, make_listener, reported_nccl_version
from penstock_rollout.metrics import RolloutMetrics
from support.answers import Answer

RUN = "push"
START_TIMEOUT_S = 240.0
MAX_SHARE_OF_OTHER = 0.2
"""The mean difference of log-probs in bfloat16, as a share of that to another version. It grows with the weights."""
EXTRA: dict[str, dict[str, Any]] = {"vllm": {}, "sglang": {"attention_backend": "triton", "grammar_backend": "none"}}

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the engines, which import parts of themselves late
    pytest.mark.skipif(not (torch.cuda.is_available() and has_cupy()), reason="needs a GPU and CuPy"),
]


def write_model(folder: Path) -> Any:
    """A random Qwen2 with heads that every attention kernel supports."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.1, bos_token_id=0, eos_token_id=1,
            tie_word_embeddings=False,
        )
    ).to("cuda", torch.bfloat16)  # fmt: skip
    model.save_pretrained(folder)
    return model.eval()


def config_of(folder: Path, transport: str) -> RunConfig:
    model = {"path": str(folder), "dtype": "bfloat16"}
    weights = {"transport": transport, "push_timeout_s": 60.0, "ready_timeout_s": 30.0}
    return validate({"run": RUN, "run_dir": str(folder.parent), "model": model, "weights": weights}, "test")


@asynccontextmanager
async def listening(config: RunConfig, engine: Engine) -> AsyncIterator[PushTarget]:
    """Start the weight listener of a rollout server in front of the engine."""
    key = ClusterKey.of(config)
    key.make_if_missing()
    listener = make_listener(key)

    async def read_term() -> int:
        return 1

    member = WeightMember(RUN, engine, RolloutMetrics(CollectorRegistry()), read_term=read_term)
    weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(member, listener)
    port = listener.add_insecure_port("127.0.0.1:0")
    await listener.start()
    yield PushTarget(
        "server", f"127.0.0.1:{port}", engine.devices, host_id(), available_transports(engine.devices),
        reported_nccl_version(engine.devices),
    )  # fmt: skip
    await listener.stop(None)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["vllm", "sglang"])
async def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Engine, Path, Any]]:
    """An engine, its model folder, and the same model in Hugging Face's library."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp("model") / "model"
    model = write_model(folder)
    config = EngineConfig(
        name=request.param, max_model_len=512, max_num_seqs=32, gpu_memory_utilization=0.2, extra=EXTRA[request.param]
    )
    engine = create_engine(config, folder, "bfloat16", seed=0)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_IB_DISABLE", "1"), ("NCCL_HOSTID", "engine")):
            patch.setenv(name, value)
        await asyncio.wait_for(engine.start(policy_version=0), START_TIMEOUT_S)
        os.environ["NCCL_HOSTID"] = "publisher"
        yield engine, folder, model
        await engine.stop()


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
async def test_versions_flip_while_requests_run(started: tuple[Engine, Path, Any], transport: str) -> None:
    engine, folder, model = started
    config = config_of(folder, transport)
    publisher = WeightPublisher(config, "127.0.0.1", torch.device("cuda", 0))
    models = {engine.policy_version: copy.deepcopy(model)}
    async with listening(config, engine) as target:
        assert transport in target.transports and "cpu" not in target.devices
        for version in (engine.policy_version + 1, engine.policy_version + 2):
            running = [asyncio.create_task(answer(engine, f"{transport}-{version}-{n}", 300)) for n in range(16)]
            await asyncio.sleep(0.3)
            report = await asyncio.to_thread(push, publisher, model, version, target)
            assert (report.committed, report.failed) == (["server"], {})
            assert report.transport == transport
            models[version] = copy.deepcopy(model)
            assert (engine.policy_version, engine.weights_digest) == (version, report.weights_digest)
            for found in await asyncio.gather(*running):
                assert set(found.versions) <= {version - 1, version}
            for n in range(4):
                new = await answer(engine, f"{transport}-{version}-new-{n}", 64)
                assert set(new.versions) == {version}
                own, other = error_of(models[version], new), error_of(models[version - 1], new)
                assert own < MAX_SHARE_OF_OTHER * other, (own, other)


def push(publisher: WeightPublisher, model: Any, version: int, target: PushTarget) -> Any:
    """Change every weight of the model, and push it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    weights = list(model.named_parameters())
    staged = publisher.begin(version, 1, [(name, tuple(weight.shape)) for name, weight in weights])
    for name, weight in weights:
        staged.put(name, weight.detach())
    return publisher.push(version, [target])


async def answer(engine: Engine, request_id: str, max_tokens: int) -> Answer:
    prompt = (7, 8, 9, 10)
    request = GenerateRequest(request_id, prompt, Sampling(max_tokens=max_tokens), stream=True)
    return Answer.of(prompt, [chunk async for chunk in engine.generate(request)])


def error_of(model: Any, found: Answer) -> float:
    ids = torch.tensor([found.prompt + found.token_ids], device="cuda")
    with torch.inference_mode():
        logits = model(ids).logits[0, len(found.prompt) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(1, ids[0, len(found.prompt) :, None])[:, 0].cpu()
    return float((torch.tensor(found.log_probs) - expected).abs().mean())
