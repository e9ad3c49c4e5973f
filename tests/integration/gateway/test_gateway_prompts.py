"""Prompts, results, groups and samples through REST and through gRPC: the same answers, the same refusals."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis

from penstock.api import records
from penstock.api.conversion import request_of, to_json
from penstock.client import PenstockClient
from penstock.client.client import prompt_body
from penstock.codec import decode_prompt, encode_group, encode_prompt
from penstock.replay.queue import RedisReplayQueue
from penstock.samples import TokenText
from penstock.trajectory import Prompt, Sampling
from penstock.v1 import (
    groups_pb2,
    groups_pb2_grpc,
    prompts_pb2,
    prompts_pb2_grpc,
)
from penstock_services.gateway import groups as group_reading
from support.gateways import (
    PROMPT,
    RUN,
    Gateway,
    as_json,
    assert_problem,
    both,
    group_of,
    post_prompts,
    read_events,
    rest,
    run_config,
    running,
    stubs,
    submit,
)
from support.groups import SAMPLE, group_of_samples, write_samples
from support.scripted_engines import spelled


async def test_prompts_are_listed_filtered_cancelled_and_waited_for(gateway: Gateway, queue: RedisReplayQueue) -> None:
    prompts, groups, _, _ = stubs(gateway)
    ids = await submit(gateway, *[PROMPT] * 3, PROMPT | {"data_source": "other"}, PROMPT)
    [lease, cancelled_lease] = await queue.lease("s", 2)
    await queue.append(lease, encode_group(group_of(1, lease.attempt)), 3)

    pages, token = [], ""
    while not pages or token:
        page = await both(
            gateway, "GET", f"{RUN}/prompts?page_size=2&page_token={token}",
            prompts.ListPrompts(prompts_pb2.ListPromptsRequest(page_size=2, page_token=token)),
            as_json(records.PromptPage),
        )  # fmt: skip
        pages.append([(record["prompt_id"], record["state"]) for record in page["prompts"]])
        token = page["next_page_token"]
    assert pages == [[(1, "QUEUED"), (2, "LEASED")], [(3, "PENDING"), (4, "PENDING")], [(5, "PENDING")]]
    pending = await rest(gateway, "GET", f"{RUN}/prompts?state=PENDING&data_source=other")
    assert [record["prompt_id"] for record in pending["prompts"]] == [4]
    listed = await both(
        gateway, "GET", f"{RUN}/groups", groups.ListGroups(groups_pb2.ListGroupsRequest()),
        as_json(records.GroupPage),
    )  # fmt: skip
    assert [(group["prompt_id"], group["min_version"], group["max_version"]) for group in listed["groups"]] == [
        (1, 3, 4)
    ]
    assert not listed["groups"][0]["is_taken"], "it waits for the learner"

    body = {"prompt_ids": [ids[0], ids[1], ids[2], 99]}
    first = await rest(gateway, "POST", f"{RUN}/prompts:cancel", json=body)
    assert [record["state"] for record in first["prompts"]] == ["CANCELLED"] * 3 + ["STATE_UNSPECIFIED"]
    again = await prompts.CancelPrompts(prompts_pb2.CancelPromptsRequest(prompt_ids=body["prompt_ids"]))
    assert [r["state"] for r in as_json(records.CancelledPrompts)(again)["prompts"]] == [
        r["state"] for r in first["prompts"]
    ]
    assert await queue.append(cancelled_lease, encode_group(group_of(2, 1)), 3) == "unknown"
    stat = await queue.stat()
    assert (stat.pending_prompts, stat.queued, stat.in_flight, stat.discarded, stat.conservation_error) == (
        2,
        0,
        0,
        2,
        0,
    )
    waited = await both(
        gateway, "GET", f"{RUN}/prompts/1:wait?timeout_s=5",
        prompts.WaitPrompt(prompts_pb2.WaitPromptRequest(prompt_id=1, timeout_s=5)),
        as_json(records.PromptRecord),
    )  # fmt: skip
    assert waited["state"] == "CANCELLED"
    assert (await rest(gateway, "GET", f"{RUN}/prompts/4:wait?timeout_s=0"))["state"] == "PENDING"


async def test_groups_are_listed_at_once_however_many_prompts_were_trained(
    gateway: Gateway, queue: RedisReplayQueue
) -> None:
    payload = encode_prompt(Prompt(messages=(("user", "2+2?"),), sampling=Sampling(max_tokens=4), num_samples=1))
    await queue.submit([payload] * 2100, [0] * 2100, "many")
    ids = (await queue.submit([payload] * 3, [1] * 3, "newest")).prompt_ids
    for lease in await queue.lease("s", 3):
        await queue.append(lease, encode_group(group_of(lease.prompt_id, lease.attempt)), 3)
    await queue.client.sadd(queue.keys.delivered, ids[0])
    pages, token = [], ""
    while not pages or token:
        page = await rest(gateway, "GET", f"{RUN}/groups?page_size=2&page_token={token}")
        pages.append([(group["prompt_id"], group["is_taken"]) for group in page["groups"]])
        token = page["next_page_token"]
    assert pages == [[(ids[1], False), (ids[2], False)], [(ids[0], True)]]


async def test_messages_keep_their_tool_calls(gateway: Gateway, queue: RedisReplayQueue) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "user", "content": "2+2?", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]  # fmt: skip
    [prompt_id] = await submit(gateway, PROMPT | {"messages": messages, "agent_name": ""})
    kept = [messages[0], messages[1] | {"content": ""}, messages[2]]
    [lease] = await queue.lease("s", 1)
    prompt = decode_prompt(lease.payload)
    assert (prompt.chat, prompt.agent_name) == (kept, ""), "the server decides on an agent"
    shown = await rest(gateway, "GET", f"{RUN}/prompts/{prompt_id}")
    assert shown["prompt"]["messages"] == kept
    assert len(await submit(gateway, prompt_body(prompt))) == 1, "the client sends them as they are"
    wrong = PROMPT | {"messages": [{"role": "assistant", "content": None}]}
    assert_problem(await post_prompts(gateway, wrong), 400, "INVALID_INPUT", "prompts[0].messages[0].content")


async def test_what_is_trained_cannot_be_cancelled(gateway: Gateway, queue: RedisReplayQueue) -> None:
    await submit(gateway, PROMPT, PROMPT)
    for lease in await queue.lease("s", 2):
        await queue.append(lease, encode_group(group_of(lease.prompt_id, lease.attempt)), 3)
    await queue.take_term(0)
    assert await queue.take(1, 1) == [1]
    answer = await rest(gateway, "POST", f"{RUN}/prompts:cancel", json={"prompt_ids": [1]})
    assert answer["prompts"][0]["state"] == "QUEUED"
    await queue.commit(1, [1])
    answer = await rest(gateway, "POST", f"{RUN}/prompts:cancel", json={"prompt_ids": [1]})
    assert answer["prompts"][0]["state"] == "TRAINED"
    assert (await queue.stat()).conservation_error == 0


async def test_results_are_resumed_by_cursor(gateway: Gateway, queue: RedisReplayQueue) -> None:
    prompts, groups, *_ = stubs(gateway)
    await submit(gateway, *[PROMPT] * 3)
    leases = await queue.lease("s", 3)
    async with gateway.rest.stream("GET", f"{RUN}/results?cursor=0&with_groups=true") as response:
        await queue.append(leases[0], encode_group(group_of(1, 1)), 3)
        await queue.give_back("s", leases[1], "broken reward", is_final=True)
        await rest(gateway, "POST", f"{RUN}/prompts:cancel", json={"prompt_ids": [3]})
        seen = await read_events(response.aiter_lines(), 3)
    assert [(r["prompt_id"], r["state"], r["reason"]) for r in seen] == [
        (1, "QUEUED", ""), (2, "DEAD_LETTERED", "broken reward"), (3, "CANCELLED", "cancelled"),
    ]  # fmt: skip
    assert all(result["cursor"] == result["event_id"] for result in seen)
    [trajectory] = seen[0]["group"]["trajectories"]
    assert trajectory["policy_versions"] == [3, 3, 4] and len(trajectory["tokens"]) == 3

    by_grpc = []
    request = prompts_pb2.WatchResultsRequest(cursor="0", with_groups=True)
    call = prompts.WatchResults(request)
    async for result in call:
        by_grpc.append(as_json(records.Result)(result))
        if len(by_grpc) == 3:
            call.cancel()
            break
    assert by_grpc == [{name: part for name, part in result.items() if name != "event_id"} for result in seen]

    headers = {"Last-Event-ID": seen[0]["cursor"]}
    async with gateway.rest.stream("GET", f"{RUN}/results", headers=headers) as response:
        assert [result["prompt_id"] for result in await read_events(response.aiter_lines(), 2)] == [2, 3]
    async with gateway.rest.stream("GET", f"{RUN}/results?cursor=0&prompt_id=3") as response:
        assert [result["prompt_id"] for result in await read_events(response.aiter_lines(), 1)] == [3]
    for cursor in ("nonsense", "1-1.0"):
        response = await gateway.rest.get(f"{RUN}/results?cursor={cursor}")
        assert (response.status_code, response.json()["field"]) == (400, "cursor")


async def test_watchers_of_results_share_one_blocking_connection(gateway: Gateway, queue: RedisReplayQueue) -> None:
    prompts, *_ = stubs(gateway)
    await submit(gateway, PROMPT)
    waiting = asyncio.ensure_future(prompts.WaitPrompt(prompts_pb2.WaitPromptRequest(prompt_id=1, timeout_s=60)))
    async with contextlib.AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(gateway.rest.stream("GET", f"{RUN}/results?cursor=0")) for _ in range(8)
        ]
        async with asyncio.timeout(100):
            while not (blocked := await blocked_reads(queue)):
                await asyncio.sleep(0.01)
        assert blocked == 1
        [lease] = await queue.lease("s", 1)
        await queue.append(lease, encode_group(group_of(1, 1)), 3)
        seen = await asyncio.gather(*(read_events(stream.aiter_lines(), 1) for stream in streams))
    assert [events[0]["prompt_id"] for events in seen] == [1] * 8
    assert (await waiting).state == prompts_pb2.PromptRecord.QUEUED


async def blocked_reads(queue: RedisReplayQueue) -> int:
    clients: Any = queue.client.client_list()
    return sum(client["cmd"] == "xread" for client in await clients)


async def test_tokens_come_with_text(gateway: Gateway, queue: RedisReplayQueue) -> None:
    from dataclasses import replace

    import numpy as np

    await submit(gateway, PROMPT)
    [lease] = await queue.lease("s", 1)
    group = group_of(1, 1)
    spoken = replace(group.trajectories[0], token_ids=np.array(spelled("ok!"), dtype=np.int32))
    await queue.append(lease, encode_group(replace(group, trajectories=(spoken,))), 3)
    _, groups, *_ = stubs(gateway)
    answer = await both(
        gateway, "GET", f"{RUN}/groups/1", groups.GetGroup(groups_pb2.GetGroupRequest(prompt_id=1)),
        as_json(records.Group),
    )  # fmt: skip
    assert (answer["trajectories"][0]["text"], answer["trajectories"][0]["tokens"]) == ("ok!", ["o", "k", "!"])


@pytest.fixture
async def gateway_without_tokenizer(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path
) -> AsyncIterator[Gateway]:
    async with running(run_config(redis_process.url, tmp_path)) as started:
        yield started


async def test_rest_and_grpc_give_the_same_answers(gateway_without_tokenizer: Gateway, queue: RedisReplayQueue) -> None:
    gateway = gateway_without_tokenizer
    submitted = (await post_prompts(gateway, PROMPT, PROMPT, idempotency_key="a")).json()
    assert submitted == {"prompt_ids": [1, 2], "replayed": False, "num_replayed": 0}
    prompt_service = prompts_pb2_grpc.PromptServiceStub(gateway.channel)
    body = request_of(prompts_pb2.Prompt, records.SubmittedPrompt.model_validate(PROMPT))
    again = await prompt_service.SubmitPrompts(
        prompts_pb2.SubmitPromptsRequest(run="test", idempotency_key="a", prompts=[body] * 2)
    )
    assert as_json(records.Submission)(again) == submitted | {"replayed": True, "num_replayed": 2}

    record = await rest(gateway, "GET", f"{RUN}/prompts/1")
    assert record["state"] == "PENDING"
    assert record["prompt"]["sampling"] == {
        "temperature": 0.7, "top_p": 1.0, "max_tokens": 16, "seed": 3, "top_k": 0, "min_p": 0.0, "ignore_eos": False,
        "stop": [],
    }  # fmt: skip
    for name in ("messages", "num_samples", "data_source", "ground_truth", "extra_info"):
        assert record["prompt"][name] == PROMPT[name]
    answer = await prompt_service.GetPrompt(prompts_pb2.GetPromptRequest(prompt_id=1))
    assert as_json(records.PromptRecord)(answer) == record

    [lease, _] = await queue.lease("s", 2)
    await queue.append(lease, encode_group(group_of(1, lease.attempt)), 3)
    group = await rest(gateway, "GET", f"{RUN}/groups/1")
    assert group["trajectories"] == [
        {
            "token_ids": [5, 6, 7],
            "loss_mask": [1, 0, 1],
            "log_probs": [-0.5, 0.0, -0.25],
            "policy_versions": [3, 3, 4],
            "reward": 1.0,
            "reward_parts": {"format": None},
            "reward_failed": False,
            "finish_reason": "stop",
            "is_baseline": False,
            "sampling_segments": [],
            "text": "",
            "tokens": [],
            "learner_log_probs": [],
        }
    ]
    answer = await groups_pb2_grpc.GroupServiceStub(gateway.channel).GetGroup(groups_pb2.GetGroupRequest(prompt_id=1))
    assert as_json(records.Group)(answer) == group


async def test_groups_are_made_json_outside_the_event_loop(
    gateway: Gateway, queue: RedisReplayQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group may have a million tokens; other requests must not wait for them."""
    threads: set[threading.Thread] = set()

    def seen(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            threads.add(threading.current_thread())
            names.add(name)
            return call(*arguments)

        return noted

    names: set[str] = set()
    monkeypatch.setattr("penstock_services.gateway.rest.LARGE_BYTES", 0)
    monkeypatch.setattr("penstock_services.gateway.rest.to_json", seen("json", to_json))
    monkeypatch.setattr(TokenText, "fill", seen("text", TokenText.fill))
    monkeypatch.setattr(group_reading, "decode_group", seen("decode", group_reading.decode_group))
    await submit(gateway, PROMPT)
    [lease] = await queue.lease("s", 1)
    await queue.append(lease, encode_group(group_of(1, lease.attempt)), 3)
    await rest(gateway, "GET", f"{RUN}/groups/1")
    async with gateway.rest.stream("GET", f"{RUN}/results?cursor=0&with_groups=true") as response:
        await read_events(response.aiter_lines(), 1)
    assert names == {"json", "text", "decode"} and threading.current_thread() not in threads


async def test_trained_samples_are_listed_by_page_by_reward_and_by_filter(gateway: Gateway) -> None:
    _, groups, _, _ = stubs(gateway)
    assert await rest(gateway, "GET", f"{RUN}/samples") == {"samples": [], "next_page_token": ""}
    changed = {"ground_truth": {"answer": [5]}, "reward_parts": {"format": None}}
    write_samples(
        gateway.config.folder,
        group_of_samples(1, 7, 0.5, 0.25),
        group_of_samples(2, 8, 1.0, data_source="code", **changed),
        group_of_samples(3, 9, -1.0, response="no idea"),
    )

    async def listed(**query: Any) -> Any:
        order = {"order": groups_pb2.ListSamplesRequest.Order.Value(query["order"])} if "order" in query else {}
        kind = {"validation": True} if "validation" in query else {}
        request = groups_pb2.ListSamplesRequest(**query | order | kind)
        words = "&".join(f"{name}={value}" for name, value in query.items())
        return await both(
            gateway, "GET", f"{RUN}/samples?{words}", groups.ListSamples(request), as_json(records.SamplePage)
        )

    def places(page: Any) -> list[tuple[int, int]]:
        return [(sample["prompt_id"], sample["sample"]) for sample in page["samples"]]

    first = await listed(page_size=2)
    assert places(first) == [(9, 0), (8, 0)]
    assert first["samples"][1] == asdict(SAMPLE) | {
        "step": 2, "policy_version": 2, "prompt_id": 8, "data_source": "code", "reward": 1.0, **changed,
    }  # fmt: skip
    second = await listed(page_size=2, page_token=first["next_page_token"])
    assert places(second) == [(7, 0), (7, 1)], "a page has whole groups"
    assert places(await listed(order="WORST", page_size=2)) == [(9, 0), (7, 1)]
    assert places(await listed(order="BEST", page_size=1)) == [(8, 0)]
    for query, expected in (
        ({"min_step": 2, "max_step": 2}, [(8, 0)]),
        ({"min_reward": 0.3, "max_reward": 0.6}, [(7, 0)]),
        ({"data_source": "code"}, [(8, 0)]),
        ({"prompt_id": 7}, [(7, 0), (7, 1)]),
        ({"text": "no idea"}, [(9, 0)]),
        ({"text": "("}, []),
    ):
        assert places(await listed(**query)) == expected, query
    assert places(await listed(validation="true")) == []
    write_samples(gateway.config.folder / "validation", group_of_samples(5, 3, validation="math"))
    [sample] = (await listed(validation="true"))["samples"]
    assert (sample["validation"], sample["step"], sample["prompt_id"]) == ("math", 5, 3)
    refused = await gateway.rest.get(f"{RUN}/samples?order=OLDEST")
    assert_problem(refused, 400, "INVALID_INPUT", "order")
    refused = await gateway.rest.get(f"{RUN}/samples?page_token=c2FtcGxlczox")
    assert_problem(refused, 400, "INVALID_INPUT", "page_token")
    async with PenstockClient.from_run_dir(gateway.config.folder) as client:
        page = await client.samples("WORST", page_size=1)
        assert (page.samples[0].response, page.samples[0].reward) == ("no idea", -1.0)
        assert (await client.samples(validation=True)).samples[0].validation == "math"
        assert (await client.samples(min_step=2, max_step=2)).samples[0].ground_truth == {"answer": [5]}
