"""Requests to SGLang and its answers as plain data, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from penstock.config.rollout import EngineConfig
from penstock.errors import ConfigError, Unavailable
from penstock.trajectory import Sampling, VersionSegment
from penstock_rollout.engines.factory import resolve_engine_name
from penstock_rollout.engines.sglang.calls import Response, generate_body
from penstock_rollout.engines.sglang.server import server_arguments

SCHEMA = json.loads((Path(__file__).parents[2] / "support" / "sglang" / "schema.json").read_text())


def body(sampling: Sampling) -> dict[str, Any]:
    return generate_body(
        "r", (3, 4), sampling, max_tokens=5, stop_ids=[1], seed=7, salt="5", chunk_tokens=64
    )  # fmt: skip


def errors(route: str, request: dict[str, Any]) -> list[str]:
    return [error.message for error in Draft202012Validator(SCHEMA["requests"][route]).iter_errors(request)]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(top_p=0.5)])
def test_generate_requests_fit_the_schema_of_sglang(sampling: Sampling) -> None:
    assert errors("/generate", body(sampling)) == []


def test_the_schema_refuses_unknown_and_mistyped_fields() -> None:
    assert errors("/generate", body(Sampling()) | {"seed": 3})
    assert errors("/generate", body(Sampling()) | {"cache_salt": 5})
    wrong = body(Sampling())
    wrong["sampling_params"]["max_tokens"] = 4
    assert errors("/generate", wrong)
    assert errors("/pause_generation", {"mode": "keep"})
    assert errors("/update_weights_from_disk", {"weight_version": "3"})
    assert errors("/update_weights_from_disk", {"model_path": "x", "weight_version": 3})


def arguments(**settings: Any) -> list[str]:
    config = EngineConfig(name="sglang", **settings)
    return server_arguments(config, Path("/model"), "bfloat16", 3, policy_version=9, port=1234)


def test_arguments_are_flags_of_sglang() -> None:
    words = arguments(enforce_eager=True, gpu_memory_utilization=0.8, tensor_parallel_size=2)
    assert {word for word in words if word.startswith("--")} <= SCHEMA["flags"].keys()
    switches = {word for word in words if SCHEMA["flags"].get(word) == "switch"}
    values = dict(zip(words, words[1:], strict=False))
    assert "--disable-overlap-schedule" in switches and "--disable-decode-cuda-graph" in switches
    assert values["--weight-version"] == "9" and values["--tp-size"] == "2" and values["--mem-fraction-static"] == "0.8"
    assert "--mem-fraction-static" not in arguments()


def test_extra_arguments_are_appended_and_replace_defaults() -> None:
    words = arguments(keep_kv_cache=False, extra={"schedule_policy": "fcfs", "enable_deterministic_inference": False})
    assert words[words.index("--schedule-policy") + 1] == "fcfs"
    assert "--enable-deterministic-inference" not in words and "--disable-overlap-schedule" not in words


@pytest.mark.parametrize("name", ["api_key", "host", "weight_version", "dp_size", "pp_size"])
def test_arguments_that_the_guarantees_rest_on_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"may not set {name}"):
        arguments(extra={name: "1"})


def test_overlap_with_kept_kv_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlap scheduler"):
        arguments(extra={"disable_overlap_schedule": False})


def message(ids: list[int], num_tokens: int, log_probs: list[float]) -> dict[str, Any]:
    entries = [[log_prob, 3, None] for log_prob in log_probs]
    return {"output_ids": ids, "meta_info": {"completion_tokens": num_tokens, "output_token_logprobs": entries}}


def test_the_last_message_of_an_aborted_request_repeats_a_token() -> None:
    """SGLang repeats the last id and all log-probs; none of them is new."""
    seen = Response(4, [5, 6, 7], [-1.0, -2.0, -3.0])
    seen.add(message([7], 3, [-1.0, -2.0, -3.0]), Sampling())
    assert (seen.token_ids, seen.log_probs) == ([5, 6, 7], [-1.0, -2.0, -3.0])
    seen = Response(4, [5, 6], [-1.0, -2.0])
    seen.add(message([7, 8], 4, [-1.0, -2.0, -3.0, -4.0]), Sampling())
    assert (seen.token_ids, seen.log_probs) == ([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0])


def test_tokens_without_log_probs_are_an_error() -> None:
    with pytest.raises(Unavailable, match="2 ids and 1 log-probs for 2 tokens"):
        Response(4).add(message([7, 8], 2, [-1.0]), Sampling())


def test_spans_that_omit_tokens_are_an_error() -> None:
    response = Response(4, [7, 8, 9], [-1.0, -1.0, -1.0], num_delivered=1, spans=(VersionSegment(0, 2, 4),))
    with pytest.raises(Unavailable, match="tokens 1 to 3"):
        response.take("stop")


def test_sglang_that_is_not_installed_is_not_replaced() -> None:
    with pytest.raises(ConfigError, match="sglang is not installed"):
        resolve_engine_name(EngineConfig(name="sglang"))
