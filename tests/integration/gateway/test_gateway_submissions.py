"""Submissions of prompts and datasets through REST and through gRPC, and what repeating one does."""

from __future__ import annotations

import asyncio
import io
import json
import resource
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pyarrow
import pytest
from pyarrow import parquet

from penstock.api import records
from penstock.api.conversion import request_of
from penstock.replay.queue import RedisReplayQueue
from penstock.v1 import (
    datasets_pb2,
    datasets_pb2_grpc,
    prompts_pb2,
)
from penstock_services.gateway.datasets import DatasetHandlers
from support.gateways import PROMPT, RUN, Gateway, as_json, assert_problem, both, post_prompts, rest, stubs


async def test_a_stream_of_submissions_is_answered_one_by_one(gateway: Gateway) -> None:
    prompts, *_ = stubs(gateway)
    body = request_of(prompts_pb2.Prompt, records.SubmittedPrompt.model_validate(PROMPT))

    async def requests() -> AsyncIterator[prompts_pb2.SubmitPromptsRequest]:
        for key, count in (("a", 1), ("b", 2), ("a", 1), ("c", 0)):
            yield prompts_pb2.SubmitPromptsRequest(idempotency_key=key, prompts=[body] * count)

    answers = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for answer in prompts.StreamPrompts(requests()):
            answers.append((list(answer.prompt_ids), answer.replayed))
    assert answers == [([1], False), ([2, 3], False), ([1], True)]
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cancelled_upload_leaves_no_file(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that checks the file goes on when its caller has left."""
    begun, left = threading.Event(), threading.Event()

    def count(*_: object) -> int:
        begun.set()
        return left.wait(60)

    monkeypatch.setattr(DatasetHandlers, "_count", count)
    datasets: Any = datasets_pb2_grpc.DatasetServiceStub(gateway.channel)
    upload = datasets_pb2.UploadDatasetRequest(name="cancelled", format="jsonl", content=b'{"prompt": "x"}')
    call = datasets.UploadDataset(upload)
    assert await asyncio.to_thread(begun.wait, 60)
    folder = gateway.config.folder / "datasets"
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(60):
        while 'inflight_requests{protocol="grpc"} 0.0' not in (await gateway.rest.get("/metrics")).text:
            await asyncio.sleep(0.05)  # until the gateway has heard of it
    assert len(list(folder.iterdir())) == 1
    left.set()
    async with asyncio.timeout(60):
        while list(folder.iterdir()):
            await asyncio.sleep(0.05)


async def test_a_dataset_is_uploaded_and_submitted_once(gateway: Gateway, queue: RedisReplayQueue) -> None:
    datasets: Any = datasets_pb2_grpc.DatasetServiceStub(gateway.channel)
    rows = [{"prompt": f"{i}+{i}=", "data_source": "sums", "reward_model": {"ground_truth": 2 * i}} for i in range(600)]
    content, path = "\n".join(map(json.dumps, rows)).encode(), f"{RUN}/datasets/sums"
    headers = {"Content-Type": "application/x-ndjson"}
    to_json = as_json(records.Dataset)
    upload = datasets_pb2.UploadDatasetRequest(name="sums", format="jsonl", content=content)
    kept = await both(gateway, "PUT", path, datasets.UploadDataset(upload), to_json, content=content, headers=headers)
    assert (kept["num_prompts"], kept["num_submitted"], kept["num_bytes"]) == (600, 0, len(content))
    submit_request = datasets_pb2.SubmitDatasetRequest(
        name="sums", num_samples=2, sampling=prompts_pb2.Sampling(temperature=1, top_p=1, max_tokens=8)
    )
    body = {"num_samples": 2, "sampling": {"max_tokens": 8}}
    done = await both(gateway, "POST", f"{path}:submit", datasets.SubmitDataset(submit_request), to_json, json=body)
    assert done["num_submitted"] == 600 and (await queue.stat()).pending_prompts == 600
    got = datasets.GetDataset(datasets_pb2.GetDatasetRequest(name="sums"))
    assert await both(gateway, "GET", path, got, to_json) == done
    record = await rest(gateway, "GET", f"{RUN}/prompts/600")
    assert (record["prompt"]["ground_truth"], record["prompt"]["num_samples"]) == (1198, 2)

    long_source = b'{"prompt": "x", "data_source": "%b"}' % (b"s" * 257)
    wrong = datasets_pb2.UploadDatasetRequest(name="wrong", format="jsonl", content=long_source)
    with pytest.raises(grpc.aio.AioRpcError, match="data_source: may have 256 characters"):
        await datasets.UploadDataset(wrong)
    for name, sent, kind, status, field in (
        ("sums", b'{"prompt": "x"}', "application/x-ndjson", 409, ""),
        ("wrong", b'{"prompt": 3}', "application/x-ndjson", 400, "content"),
        ("wrong", long_source, "application/x-ndjson", 400, "content"),
        ("wrong", b"no parquet", "application/vnd.apache.parquet", 400, "content"),
        ("wrong", b"", "text/csv", 400, "content-type"),
        (".hidden", content, "application/x-ndjson", 400, "name"),
    ):
        answer = await gateway.rest.put(f"{RUN}/datasets/{name}", content=sent, headers={"Content-Type": kind})
        assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text
    assert [path.name for path in (gateway.config.folder / "datasets").iterdir()] == ["sums.jsonl"]


async def test_a_small_file_that_decodes_to_much_is_refused(gateway: Gateway) -> None:
    """Each of 4,000 rows repeats one text of 200 kB, so a file of some kilobytes decodes to 800 MB."""
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4000, pyarrow.int32()), ["x" * 200_000])
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"prompt": repeated}), file, compression="zstd")
    assert len(file.getvalue()) < 100_000
    headers = {"Content-Type": "application/vnd.apache.parquet"}
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = await gateway.rest.put(f"{RUN}/datasets/bomb", content=file.getvalue(), headers=headers)
    assert_problem(answer, 400, "INVALID_INPUT", "content")
    assert "decodes to more than 268435456 bytes; split it" in answer.json()["detail"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 300_000
    lines = b'{"prompt": "a"}\n' * 100_001
    answer = await gateway.rest.put(
        f"{RUN}/datasets/many", content=lines, headers={"Content-Type": "application/x-ndjson"}
    )
    assert_problem(answer, 400, "INVALID_INPUT", "content")
    for name in ("bomb", "many"):
        assert (await gateway.rest.get(f"{RUN}/datasets/{name}")).status_code == 404
    assert list((gateway.config.folder / "datasets").iterdir()) == []


async def test_repeating_a_submission_changes_nothing(gateway: Gateway, queue: RedisReplayQueue) -> None:
    first = (await post_prompts(gateway, PROMPT, idempotency_key="k")).json()
    body = {"prompts": [PROMPT]}
    again = await gateway.rest.post(f"{RUN}/prompts", json=body, headers={"Idempotency-Key": "k"})
    assert again.json() == first | {"replayed": True, "num_replayed": 1}
    assert (await queue.stat()).pending_prompts == 1
    assert_problem(await post_prompts(gateway, PROMPT, PROMPT, idempotency_key="k"), 409, "CONFLICT")
    body |= {"idempotency_key": "other"}
    differing = await gateway.rest.post(f"{RUN}/prompts", json=body, headers={"Idempotency-Key": "k"})
    assert_problem(differing, 400, "INVALID_INPUT", "idempotency_key")


async def test_a_key_for_each_prompt_submits_it_once_whatever_it_comes_with(gateway: Gateway) -> None:
    prompts, _, _, _ = stubs(gateway)

    async def submitted(*keys: str) -> Any:
        body = {"prompts": [PROMPT] * len(keys), "prompt_keys": list(keys)}
        return await rest(gateway, "POST", f"{RUN}/prompts", json=body)

    assert await submitted("a", "b", "c") == {"prompt_ids": [1, 2, 3], "replayed": False, "num_replayed": 0}
    assert await submitted("b") == {"prompt_ids": [2], "replayed": True, "num_replayed": 1}
    assert await submitted("c", "d") == {"prompt_ids": [3, 4], "replayed": False, "num_replayed": 1}
    message = request_of(prompts_pb2.Prompt, records.SubmittedPrompt.model_validate(PROMPT))
    answer = await prompts.SubmitPrompts(prompts_pb2.SubmitPromptsRequest(prompts=[message], prompt_keys=["d"]))
    assert (list(answer.prompt_ids), answer.num_replayed) == ([4], 1)
    for wrong, field in (
        ({"prompt_keys": ["x", "y"]}, "prompt_keys"),
        ({"prompt_keys": [""]}, "prompt_keys[0]"),
        ({"prompt_keys": ["x"], "idempotency_key": "k"}, "prompt_keys"),
        ({"prompt_keys": ["x", "y", "x"], "prompts": [PROMPT] * 3}, "prompt_keys[2]"),
    ):
        refused = await gateway.rest.post(f"{RUN}/prompts", json={"prompts": [PROMPT]} | wrong)
        assert_problem(refused, 400, "INVALID_INPUT", field)


async def test_a_prompt_key_that_was_the_key_of_a_request_of_several_prompts_is_refused(
    gateway: Gateway, queue: RedisReplayQueue
) -> None:
    await rest(gateway, "POST", f"{RUN}/prompts", json={"prompts": [PROMPT] * 2, "idempotency_key": "pair"})
    body = {"prompts": [PROMPT] * 2, "prompt_keys": ["new", "pair"]}
    refused = await gateway.rest.post(f"{RUN}/prompts", json=body)
    assert "prompt_keys[1] was used for another request" in assert_problem(refused, 409, "CONFLICT")
    assert (await queue.stat()).pending_prompts == 2, "all prompts of a request are accepted, or none"
    body = {"prompts": [PROMPT] * 2, "prompt_keys": ["new", "other"]}
    answer = await rest(gateway, "POST", f"{RUN}/prompts", json=body)
    assert (answer["prompt_ids"], answer["num_replayed"]) == ([3, 4], 0)


async def test_keys_of_tasks_and_of_prompts_do_not_meet(gateway: Gateway, queue: RedisReplayQueue) -> None:
    """A stranger reuses the key of a task for prompts while others submit. Every acknowledged prompt is stored."""
    await rest(gateway, "POST", "/v1/tasks", json={"tasks": [{"payload": 1}]}, headers={"Idempotency-Key": "fooX"})

    async def attack() -> None:
        for _ in range(20):
            assert (await post_prompts(gateway, PROMPT, idempotency_key="tasks:fooX")).status_code == 200

    async def innocent(number: int) -> list[int]:
        for _ in range(20):
            response = await post_prompts(gateway, PROMPT, idempotency_key=f"innocent-{number}")
            if response.status_code == 200:
                return list(response.json()["prompt_ids"])
        raise AssertionError(response.text)

    _, *acknowledged = await asyncio.gather(attack(), *(innocent(number) for number in range(60)))
    ids = [prompt_id for prompt_ids in acknowledged for prompt_id in prompt_ids]
    assert len(set(ids)) == 60
    assert {(await queue.get_prompt(prompt_id)).state for prompt_id in ids} == {"pending"}
    assert (await queue.stat()).pending_prompts == 61
