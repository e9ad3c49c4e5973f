"""The HTTP port of a rollout server: the same protocols as the gateway, health and metrics for routers of inference."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.process_endpoint import Readiness
from support.protocol_run import ProtocolRun

QUESTION: Any = [{"role": "user", "content": "2+2?"}]
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "maxProperties": 0}}}


def test_a_server_answers_as_the_gateway_does(served_run: ProtocolRun, openai_client: openai.OpenAI) -> None:
    options: Any = {"model": "test@3", "messages": QUESTION, "seed": 11, "max_tokens": 12, "logprobs": True}
    with openai.OpenAI(base_url=f"{served_run.server_url}/v1", api_key=served_run.key, max_retries=0) as direct:
        mine, other = direct.chat.completions.create(**options), openai_client.chat.completions.create(**options)
        assert [model.id for model in direct.models.list()] == ["test", "test@3"]
        assert mine.choices == other.choices and mine.usage == other.usage
        parts = direct.chat.completions.create(**options, stream=True)
        texts = [choice.delta.content or "" for part in parts for choice in part.choices]
        assert "".join(texts) == mine.choices[0].message.content and len(texts) > 2
        called = direct.responses.create(model="test", input="hi", tools=[ADD["function"] | {"type": "function"}],
                                         tool_choice="required", parallel_tool_calls=False)  # fmt: skip
        assert [item.type for item in called.output] == ["function_call"]
        with pytest.raises(openai.BadRequestError, match="logit_bias") as refused:
            direct.chat.completions.create(model="test", messages=QUESTION, logit_bias={"5": 1})
        assert refused.value.param == "logit_bias"
        with pytest.raises(openai.NotFoundError, match="serves version 3, not 4"):
            direct.chat.completions.create(model="test@4", messages=QUESTION)
        with pytest.raises(openai.BadRequestError, match="sessions are recorded by the gateway"):
            direct.chat.completions.create(model="test", messages=QUESTION, extra_headers={"X-Penstock-Session": "a"})
    with anthropic.Anthropic(base_url=served_run.server_url, api_key=served_run.key, max_retries=0) as client:
        assert client.messages.create(model="test", max_tokens=3, messages=QUESTION).usage.output_tokens == 3


def test_keys_of_the_gateway_are_needed(served_run: ProtocolRun) -> None:
    with openai.OpenAI(base_url=f"{served_run.server_url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="test", messages=QUESTION)


def test_routers_find_health_and_metrics(served_run: ProtocolRun) -> None:
    with httpx.Client(base_url=served_run.server_url, trust_env=False) as client:
        families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
        for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
            [sample] = families[name].samples
            assert sample.labels == {"model_name": "test"} and sample.value >= 0
        assert client.get("/health").status_code == 200
        served_run.readiness.append(Readiness("draining", "leaves"))
        try:
            assert client.get("/health").status_code == 503
            key = {"Authorization": f"Bearer {served_run.key}"}
            refused = client.post("/v1/completions", json={"model": "test", "prompt": "a"}, headers=key)
            assert refused.status_code == 503 and "Retry-After" in refused.headers
        finally:
            served_run.readiness.pop()
        too_large = client.post("/v1/completions", content=b"x" * (17 << 20), headers=key)
        assert too_large.status_code == 400 and "max_body_bytes" in too_large.text
