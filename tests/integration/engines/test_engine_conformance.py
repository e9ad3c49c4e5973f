"""The promises of engines/engine.py, tested for every engine against plain Hugging Face forward passes."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from penstock.config.rollout import EngineConfig
from penstock.errors import ConfigError, InvalidInput, Unavailable, WeightPushFailed
from penstock.trajectory import Sampling
from penstock.v1 import weights_pb2
from penstock.weights.snapshot import write_snapshot
from penstock_rollout.engines.engine import GenerateRequest, TokenChunk
from penstock_rollout.engines.factory import create_engine
from support.served_engines import (
    DEADLINE_S,
    LONG,
    MAX_MODEL_LEN,
    TOLERANCE,
    Answer,
    Publisher,
    Push,
    Served,
    assert_log_probs,
    expected_log_probs,
    hold_decoding,
    idle,
    start_engine,
    until_submitted,
)
from support.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

KINDS = ["torch", "vllm", pytest.param("sglang", marks=pytest.mark.long)]


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=KINDS,
)
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    served = await start_engine(request.param, tmp_path_factory.mktemp("model"), keep_kv_cache=True)
    yield served
    await served.engine.stop()


async def test_quantization_is_refused_where_it_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs vllm on CUDA"):
        create_engine(EngineConfig(name="torch", quantization="fp8"), tmp_path, "float32", seed=0)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_are_of_the_sampled_distribution(served: Served, temperature: float, stream: bool) -> None:
    prompts = [tuple(range(2, 3 + index)) for index in range(12)]
    sampling = Sampling(temperature=temperature, max_tokens=24)
    answers = await asyncio.gather(*(served.answer(prompt, sampling, stream) for prompt in prompts))
    for answer in answers:
        assert_log_probs(served.model, answer, temperature)


async def test_an_interrupted_request_hands_over_its_tokens_and_can_be_continued(served: Served) -> None:
    num_asked = 480  # as many as fit, so that the request still runs when the interrupt comes
    prompt, sampling = (5, 6, 7), Sampling(max_tokens=num_asked, ignore_eos=True)
    request = GenerateRequest("interrupted.0", prompt, sampling, stream=True, min_chunk_tokens=8)
    chunks: list[TokenChunk] = []
    async for chunk in served.engine.generate(request):
        chunks.append(chunk)
        if len(chunks) == 3:
            await served.engine.interrupt(["interrupted.0", "unknown"])
    answer = Answer.of(prompt, chunks)
    assert answer.finish_reason == "aborted" and 17 <= len(answer.token_ids) < num_asked
    assert all(len(chunk.token_ids) >= 8 for chunk in chunks[1:-1]), "but for the first and the last"
    assert_log_probs(served.model, answer)
    rest = replace(sampling, max_tokens=num_asked - len(answer.token_ids))
    continued = await served.answer((*prompt, *answer.token_ids), rest)
    assert (len(continued.token_ids), continued.finish_reason) == (rest.max_tokens, "length")
    assert_log_probs(served.model, continued)


async def test_top_p_renormalizes_over_the_nucleus(served: Served) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.6, max_tokens=16)
    for answer in await asyncio.gather(*(served.answer((5, 6, index), sampling) for index in range(2, 8))):
        plain = expected_log_probs(served.model, answer, sampling.temperature)
        ids = torch.tensor([answer.prompt + answer.token_ids])
        with torch.inference_mode():
            probs = (served.model(ids).logits[0, len(answer.prompt) - 1 : -1] / sampling.temperature).softmax(-1)
        ordered = probs.sort(dim=-1, descending=True).values
        nucleus = torch.where(ordered.cumsum(-1) - ordered < sampling.top_p, ordered, 0).sum(-1)
        torch.testing.assert_close(torch.tensor(answer.log_probs), plain - nucleus.log(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("sampling", [Sampling(0.8, max_tokens=16, top_k=3), Sampling(0.8, max_tokens=16, min_p=0.7)])
async def test_top_k_and_min_p_renormalize_over_the_likely_tokens(served: Served, sampling: Sampling) -> None:
    if sampling.min_p and served.engine.name == "sglang":
        pytest.skip("SGLang refuses min_p")
    for answer in await asyncio.gather(*(served.answer((5, 6, index), sampling) for index in range(2, 8))):
        plain = expected_log_probs(served.model, answer, sampling.temperature)
        ids = torch.tensor([answer.prompt + answer.token_ids])
        with torch.inference_mode():
            probs = (served.model(ids).logits[0, len(answer.prompt) - 1 : -1] / sampling.temperature).softmax(-1)
        ordered = probs.sort(dim=-1, descending=True).values
        kept = ordered[:, : sampling.top_k or None]
        mass = torch.where(kept >= sampling.min_p * ordered[:, :1], kept, 0).sum(-1)
        assert (mass < 0.999).any(), "the test needs tokens that are left out"
        torch.testing.assert_close(torch.tensor(answer.log_probs), plain - mass.log(), atol=TOLERANCE, rtol=0)


async def test_a_request_may_go_on_after_a_stop_token(served: Served) -> None:
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    answers = await asyncio.gather(*(served.answer((9, 10), sampling) for _ in range(32)))
    assert {(answer.finish_reason, len(answer.token_ids)) for answer in answers} == {("length", 40)}


async def test_greedy_tokens_are_those_of_hugging_face(served: Served) -> None:
    prompt = (11, 12, 13, 14)
    answer = await served.answer(prompt, Sampling(temperature=0, max_tokens=20))
    ids = torch.tensor([prompt])
    generated = served.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    assert list(answer.token_ids) == generated[0, len(prompt) :].tolist()


async def test_seeds_reproduce_whatever_runs_concurrently(served: Served) -> None:
    alone = [await served.answer((3, 4), Sampling(max_tokens=16, seed=seed)) for seed in (7, -1)]
    seeds = [*range(20), -1]
    crowd = await asyncio.gather(*(served.answer((3, 4), Sampling(max_tokens=16, seed=seed)) for seed in seeds))
    assert [crowd[7].token_ids, crowd[-1].token_ids] == [answer.token_ids for answer in alone]
    assert len({answer.token_ids for answer in crowd}) > 15


async def test_seeded_prompts_may_be_more_than_a_step_holds(served: Served) -> None:
    prompt = tuple(2 + index % (VOCAB_SIZE - 2) for index in range(400))
    sampled = (served.answer((seed + 2, *prompt), Sampling(max_tokens=4, seed=seed)) for seed in range(16))
    for answer in await asyncio.gather(*sampled):
        assert_log_probs(served.model, answer)


async def test_responses_end_at_eos_or_max_tokens(served: Served) -> None:
    answers = await asyncio.gather(*(served.answer((9, 10), Sampling(max_tokens=40)) for _ in range(128)))
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for answer in answers:
        assert EOS_TOKEN_ID not in answer.token_ids[:-1]
        if answer.finish_reason == "stop":
            assert answer.token_ids[-1] == EOS_TOKEN_ID
        else:
            assert len(answer.token_ids) == 40


async def test_responses_end_at_the_models_length(served: Served) -> None:
    prompts = [tuple(2 + (index + place) % 60 for place in range(506)) for index in range(12)]
    answers = await asyncio.gather(*(served.answer(prompt, Sampling(max_tokens=400)) for prompt in prompts))
    cut = [answer for answer in answers if answer.finish_reason == "length"]
    assert cut and all(len(answer.prompt) + len(answer.token_ids) == MAX_MODEL_LEN for answer in cut)
    for answer in answers:
        assert_log_probs(served.model, answer)


async def test_prompt_that_does_not_fit_is_refused(served: Served) -> None:
    with pytest.raises(InvalidInput):
        await served.answer((5,) * 600, Sampling(max_tokens=4))
    await served.check_serves(served.engine.policy_version)


async def test_closing_the_iterator_frees_the_request(served: Served) -> None:
    chunks = served.chunks((4, 5, 6), LONG)
    await anext(chunks)
    assert served.engine.stats().running_requests == 1
    await chunks.aclose()  # type: ignore[attr-defined]
    stats = await idle(served)
    assert (stats.running_requests, stats.waiting_requests, stats.kv_cache_usage) == (0, 0, 0.0)


async def _rest(chunks: AsyncIterator[TokenChunk]) -> list[TokenChunk]:
    return [chunk async for chunk in chunks]


async def run_through_update(served: Served) -> tuple[list[Answer], int]:
    """Start 24 generations, update once all have tokens, and return the finished answers and the new version."""
    prompts = [tuple(range(2, 10 + index)) for index in range(24)]
    streams = [served.chunks(prompt, LONG, stream=index % 2 == 0) for index, prompt in enumerate(prompts)]
    model = served.next_model()
    firsts = await asyncio.gather(*(anext(stream) for stream in streams[::2]))
    rests = [asyncio.ensure_future(_rest(stream)) for stream in streams[::2]]
    silent = [asyncio.ensure_future(_rest(stream)) for stream in streams[1::2]]
    await asyncio.sleep(0)
    version = await served.update(model)
    answers = [
        Answer.of(prompt, [first, *await rest]) for prompt, first, rest in zip(prompts[::2], firsts, rests, strict=True)
    ]
    answers += [Answer.of(prompt, await rest) for prompt, rest in zip(prompts[1::2], silent, strict=True)]
    return answers, version


async def test_versions_are_right_across_an_in_flight_update(served: Served) -> None:
    before = served.model
    answers, version = await run_through_update(served)
    spanning = [answer for answer in answers if set(answer.versions) == {version - 1, version}]
    assert spanning, "some generation must have run through the update"
    for answer in answers:
        assert list(answer.versions) == sorted(answer.versions)
        old = answer.versions.count(version - 1)
        expected = expected_log_probs(before, answer)[:old]
        torch.testing.assert_close(torch.tensor(answer.log_probs[:old]), expected, atol=TOLERANCE, rtol=0)
        if old == 0:
            assert_log_probs(served.model, answer)
    for answer in spanning:
        found = torch.tensor(answer.log_probs[answer.versions.index(version) :])
        stale = expected_log_probs(before, answer)[answer.versions.index(version) :]
        assert (found - stale).abs().max() > 0.01, "tokens stamped new must not come from the old weights"
    await served.check_serves(version)


async def test_requests_that_did_not_start_see_the_new_version_only(served: Served) -> None:
    """The prefix cache of the old version holds their prompt, and must not be used."""
    prompt = tuple(2 + index % (VOCAB_SIZE - 2) for index in range(300))
    await served.answer(prompt, Sampling(max_tokens=4))
    await hold_decoding(served.engine)
    waiting = [asyncio.ensure_future(served.answer(prompt, Sampling(max_tokens=8))) for _ in range(4)]
    await until_submitted(served.engine, 4)
    assert not any(answer.done() for answer in waiting)
    version = await served.update(served.next_model())
    for answer in [*await asyncio.gather(*waiting), await served.answer(prompt, Sampling(max_tokens=8))]:
        assert set(answer.versions) == {version}
        assert_log_probs(served.model, answer)


async def test_a_version_that_is_loaded_again_shares_no_kv_with_its_first_load(served: Served) -> None:
    """The first load may have been wrong: the learner loads a server again whose log-probs disagree."""
    prompt = tuple(2 + index % (VOCAB_SIZE - 2) for index in range(300))
    await served.answer(prompt, Sampling(max_tokens=4))
    version = await served.update(served.next_model(), served.engine.policy_version)
    answer = await served.answer(prompt, Sampling(max_tokens=8))
    assert set(answer.versions) == {version}
    assert_log_probs(served.model, answer)


async def test_corrupt_buckets_are_refused(served: Served) -> None:
    version = served.engine.policy_version
    push = Push.of(served.next_model(), version + 1)
    announced = push.checksums
    push.buckets[1][100] ^= 1
    publisher = Publisher(push)
    await served.engine.stage_weights(publisher.announcement())
    publisher.start()
    with pytest.raises(WeightPushFailed, match="bucket 1 is corrupt"):
        await served.engine.commit_weights(version + 1, announced, timeout_s=DEADLINE_S)
    publisher.join()
    await served.check_serves(version)


async def test_weights_of_another_model_are_refused(served: Served) -> None:
    version = served.engine.policy_version
    push = Push.of(served.next_model(), version + 1)
    push.manifest.tensors[3].name = "model.layers.7.mlp.up_proj.weight"
    with pytest.raises(WeightPushFailed, match="lacks 1 tensors"):
        await served.engine.stage_weights(Publisher(push).announcement())
    with pytest.raises(WeightPushFailed, match="not staged"):
        await served.engine.commit_weights(version + 1, push.checksums, timeout_s=1)
    await served.check_serves(version)


@pytest.mark.parametrize("num_buckets", [None, 1], ids=["never comes", "stalls after a bucket"])
async def test_publisher_that_fails_leaves_the_engine_healthy(served: Served, num_buckets: int | None) -> None:
    version = served.engine.policy_version
    push = Push.of(served.next_model(), version + 1)
    publisher = Publisher(push, num_buckets)
    await served.engine.stage_weights(publisher.announcement(timeout_s=0.5))
    if num_buckets is not None:
        publisher.start()
    with pytest.raises(WeightPushFailed, match="took longer than 0.5 s"):
        await served.engine.commit_weights(version + 1, push.checksums, timeout_s=DEADLINE_S)
    await served.check_serves(version)


async def test_aborted_stage_is_forgotten(served: Served) -> None:
    version = served.engine.policy_version
    push = Push.of(served.next_model(), version + 1)
    await served.engine.stage_weights(Publisher(push).announcement())
    await served.engine.abort_weights()
    await served.engine.abort_weights()
    with pytest.raises(WeightPushFailed, match="not staged"):
        await served.engine.commit_weights(version + 1, push.checksums, timeout_s=5)
    await served.check_serves(version)
    await served.check_serves(await served.update(served.next_model()))


async def test_a_commit_whose_stage_was_replaced_fails_and_spares_the_new_one(served: Served, tmp_path: Path) -> None:
    version = served.engine.policy_version
    model = served.next_model()
    replaced, push = Push.of(served.next_model(), version + 1), Push.of(model, version + 2)
    await served.engine.stage_weights(Publisher(replaced).announcement())
    waiting = asyncio.create_task(served.engine.commit_weights(version + 1, replaced.checksums, timeout_s=DEADLINE_S))
    await asyncio.sleep(0.1)
    await served.engine.stage_weights(in_snapshot(push, tmp_path))
    with pytest.raises(WeightPushFailed):
        await waiting
    await served.engine.commit_weights(version + 2, push.checksums, timeout_s=DEADLINE_S)
    served.model = model
    await served.check_serves(version + 2)


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.01, 0.02])
async def test_a_stage_that_begins_under_a_commit_never_mixes_with_it(
    served: Served, tmp_path: Path, delay_s: float
) -> None:
    """The commit loads its own version or none, at whatever time the next version is announced."""
    version = served.engine.policy_version
    first = served.next_model()
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.model.embed_tokens.weight.mul_(1.5)
    pushes = Push.of(first, version + 1), Push.of(second, version + 2)
    requests = [in_snapshot(push, tmp_path / str(push.manifest.policy_version)) for push in pushes]
    await served.engine.stage_weights(requests[0])
    committing = asyncio.create_task(
        served.engine.commit_weights(version + 1, pushes[0].checksums, timeout_s=DEADLINE_S)
    )
    await asyncio.sleep(delay_s)
    await served.engine.stage_weights(requests[1])
    try:
        await committing
        served.model = first
        await served.check_serves(version + 1)
    except WeightPushFailed:
        await served.check_serves(version)
    await served.engine.commit_weights(version + 2, pushes[1].checksums, timeout_s=DEADLINE_S)
    served.model = second
    await served.check_serves(version + 2)


def in_snapshot(push: Push, folder: Path) -> weights_pb2.AnnounceRequest:
    write_snapshot(folder, push.manifest, push.buckets, push.checksums)
    return snapshot_announcement(push, folder)


def snapshot_announcement(push: Push, folder: Path) -> weights_pb2.AnnounceRequest:
    return weights_pb2.AnnounceRequest(
        manifest=push.manifest,
        transport="snapshot",
        rendezvous=str(folder),
        rank=0,
        world_size=1,
        deadline_s=DEADLINE_S,
    )


async def test_snapshot_transport(served: Served, tmp_path: Path) -> None:
    version = served.engine.policy_version + 1
    model = served.next_model()
    push = Push.of(model, version)
    write_snapshot(tmp_path, push.manifest, push.buckets, push.checksums)
    await served.engine.stage_weights(snapshot_announcement(push, tmp_path))
    await served.engine.commit_weights(version, push.checksums, timeout_s=DEADLINE_S)
    served.model = model
    await served.check_serves(version)


async def test_snapshot_that_is_not_there_is_refused(served: Served, tmp_path: Path) -> None:
    version = served.engine.policy_version
    push = Push.of(served.next_model(), version + 1)
    await served.engine.stage_weights(snapshot_announcement(push, tmp_path))
    with pytest.raises(WeightPushFailed, match="is not there"):
        await served.engine.commit_weights(version + 1, push.checksums, timeout_s=DEADLINE_S)
    await served.check_serves(version)


async def stop_while_generating(served: Served) -> None:
    """Running requests end as aborted, with the tokens they have. No child process stays."""
    num_children = len(multiprocessing.active_children())
    silent = asyncio.ensure_future(served.answer((3, 4, 5), LONG))
    streamed = served.chunks((3, 4, 6), LONG)
    first = await anext(streamed)
    await served.engine.stop()
    async with asyncio.timeout(60):
        for answer in (await silent, Answer.of((3, 4, 6), [first, *await _rest(streamed)])):
            assert answer.finish_reason == "aborted"
        while len(multiprocessing.active_children()) != num_children - (served.engine.name == "vllm"):
            await asyncio.sleep(0.05)
    with pytest.raises(Unavailable):
        await served.answer((3,), LONG)


@pytest.mark.parametrize("kind", KINDS)
async def test_recomputed_kv_makes_running_requests_exact(kind: str, tmp_path: Path) -> None:
    served = await start_engine(kind, tmp_path, keep_kv_cache=False)
    try:
        answers, version = await run_through_update(served)
    finally:
        await stop_while_generating(served)
    assert any(set(answer.versions) == {version - 1, version} for answer in answers)
    for answer in answers:
        new = answer.versions.count(version)
        expected = expected_log_probs(served.model, answer)[len(answer.versions) - new :]
        found = torch.tensor(answer.log_probs[len(answer.versions) - new :])
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("keep_kv_cache", [True, False])
async def test_own_stamps_are_those_of_vllm(
    keep_kv_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's output handler is delayed during each flip, so that tokens of both versions wait for it."""
    served = await start_engine("vllm-compared-stamps", tmp_path, keep_kv_cache)
    from vllm.v1.engine.core_client import AsyncMPClient

    take_output, may_take = AsyncMPClient.get_output_async, asyncio.Event()

    async def take_late(client: Any) -> Any:
        await may_take.wait()
        return await take_output(client)

    monkeypatch.setattr(AsyncMPClient, "get_output_async", take_late)
    may_take.set()
    prompts = [tuple(range(2, 10 + index)) for index in range(24)]
    streams = [served.chunks(prompt, LONG, stream=index % 2 == 0) for index, prompt in enumerate(prompts)]
    try:
        answers = [asyncio.ensure_future(_rest(stream)) for stream in streams]
        for _ in range(3):
            await asyncio.sleep(0.1)
            may_take.clear()
            await asyncio.sleep(0.05)
            await served.update(served.next_model())
            may_take.set()
        finished = [Answer.of(prompt, await chunks) for prompt, chunks in zip(prompts, answers, strict=True)]
    finally:
        may_take.set()
        await served.engine.stop()
    assert any(len(set(answer.versions)) > 2 for answer in finished)


@pytest.mark.long
async def test_a_model_over_two_workers_is_updated_in_flight(tmp_path: Path) -> None:
    served = await start_engine("vllm-parallel", tmp_path / "model", keep_kv_cache=False)
    try:
        assert served.engine.devices == ("cpu", "cpu")
        await served.check_serves(5)
        streams = [served.chunks((3, 4, 2 + index), LONG) for index in range(8)]
        firsts = await asyncio.gather(*(anext(stream) for stream in streams))
        rests = [asyncio.ensure_future(_rest(stream)) for stream in streams]
        model = served.next_model()
        push = Push.of(model, 6)
        await served.engine.stage_weights(in_snapshot(push, tmp_path / "snapshot"))
        await served.engine.commit_weights(6, push.checksums, timeout_s=DEADLINE_S)
        served.model = model
        answers = [Answer.of((3, 4, 2 + i), [firsts[i], *await rest]) for i, rest in enumerate(rests)]
        assert any(set(answer.versions) == {5, 6} for answer in answers)
        for answer in answers:
            new = answer.versions.count(6)
            expected = expected_log_probs(model, answer)[len(answer.versions) - new :]
            found = torch.tensor(answer.log_probs[len(answer.versions) - new :])
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        await served.check_serves(6)
    finally:
        await served.engine.stop()
