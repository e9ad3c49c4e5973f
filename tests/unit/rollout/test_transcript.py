"""Multi-turn responses: the trained ids, their mask, versions and limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import PenstockError
from penstock.trajectory import VersionSegment
from penstock_rollout.agents.transcript import Transcript
from penstock_rollout.engines.engine import GenerateRequest, TokenChunk
from penstock_rollout.tokenization import Tokenization
from support.scripted_engines import (
    CHATML,
    END,
    LOG_PROB,
    OTHER_END,
    PLAIN,
    ScriptedEngine,
    make_context,
    make_tokenizer_folder,
    spelled,
)

FEEDBACK = [{"role": "user", "content": "abc"}]


@pytest.fixture
def tokenization(tmp_path: Path) -> Tokenization:
    return Tokenization(make_tokenizer_folder(tmp_path))


async def test_sampled_ids_are_trained_though_the_tokenizer_would_write_others(tokenization: Tokenization) -> None:
    first, second = (*spelled("abcab"), END), (*spelled("ok"), END)
    engine = ScriptedEngine([first, second])
    context = make_context(engine, tokenization)
    transcript = Transcript(context)
    await transcript.sample_turn()
    assert transcript.insert(FEEDBACK)
    turn = await transcript.sample_turn()
    episode = transcript.episode(turn.finish_reason)

    again = tokenization.tokenizer(tokenization.raw_text(first), add_special_tokens=False)["input_ids"]
    assert tuple(again) != first[:-1], "the test needs a tokenizer that does not round-trip"
    inserted = tuple(episode.token_ids[len(first) : -len(second)].tolist())
    assert tuple(episode.token_ids.tolist()) == first + inserted + second
    assert tokenization.raw_text(inserted) == "\n<|start|>user\nabc<|end|>\n<|start|>assistant\n"
    assert engine.requests[1].prompt_token_ids == context.prompt_token_ids + first + inserted
    sampled = [1] * len(first) + [0] * len(inserted) + [1] * len(second)
    assert episode.loss_mask.tolist() == sampled
    assert episode.log_probs.tolist() == [LOG_PROB * mask for mask in sampled]
    assert [request.request_id for request in engine.requests] == ["7.1.0.0", "7.1.0.1"]
    assert tokenization.text(episode.token_ids[episode.last_turn_start :].tolist()) == "ok"


@pytest.mark.parametrize(
    ("template", "end", "between"),
    [
        (CHATML, (END,), "\n<|start|>user\nabc<|end|>\n<|start|>assistant\n"),
        (CHATML, (OTHER_END,), "\n<|start|>user\nabc<|end|>\n<|start|>assistant\n"),
        (CHATML, (), "<|end|>\n<|start|>user\nabc<|end|>\n<|start|>assistant\n"),
        (CHATML.replace("<|end|>", "\n<|end|>"), (END,), "\n<|start|>user\nabc\n<|end|>\n<|start|>assistant\n"),
        (PLAIN, (END,), "\nuser: abc\nassistant: "),
        (PLAIN, (), "\nuser: abc\nassistant: "),
        (PLAIN.replace("content }}", "content }}{{ '<|end|>' if message.role == 'user' else '' }}"), (END,),
         "\nuser: abc<|end|>\nassistant: "),
    ],
    ids=["template's stop", "another stop", "cut", "stop after a new line", "no stop in the template", "neither",
         "stop of the next message"],
)  # fmt: skip
async def test_a_turn_is_ended_once_whatever_ended_it(
    tmp_path: Path, template: str, end: tuple[int, ...], between: str
) -> None:
    tokenization = Tokenization(make_tokenizer_folder(tmp_path, template))
    first = (*spelled("ab"), *end)
    engine = ScriptedEngine([first, (*spelled("ok"), END)])
    transcript = Transcript(make_context(engine, tokenization, max_turn_tokens=len(first)))
    await transcript.sample_turn()
    assert transcript.insert(FEEDBACK)
    await transcript.sample_turn()
    start = len(make_context(engine, tokenization).prompt_token_ids) + len(first)
    inserted = engine.requests[1].prompt_token_ids[start:]
    assert tokenization.tokenizer.decode(inserted) == between


async def test_inserted_ids_are_the_rendered_conversation_if_ids_round_trip(
    tokenization: Tokenization,
) -> None:
    """If the sampled ids are those that the tokenizer would produce, the second prompt is the rendered conversation."""
    from penstock.trajectory import Prompt

    engine = ScriptedEngine([(*spelled("xyz"), END), (END,)])
    context = make_context(engine, tokenization)
    transcript = Transcript(context)
    await transcript.sample_turn()
    transcript.insert(FEEDBACK)
    await transcript.sample_turn()
    whole = Prompt(messages=(*context.prompt.messages, ("assistant", "xyz"), ("user", "abc")))
    assert engine.requests[1].prompt_token_ids == tokenization.prompt_ids(whole)


async def test_inserted_tokens_belong_to_the_version_before_them(tokenization: Tokenization) -> None:
    turns = [(*spelled("one"), END), (*spelled("two"), END), (*spelled("three"), END)]
    engine = ScriptedEngine(turns, versions=[4, 4, 6])
    transcript = Transcript(make_context(engine, tokenization))
    for _ in range(2):
        await transcript.sample_turn()
        transcript.insert(FEEDBACK)
    await transcript.sample_turn()
    episode = transcript.episode("stop")
    num_tokens = len(episode.token_ids)
    assert episode.segments == (
        VersionSegment(0, num_tokens - len(turns[2]), 4),
        VersionSegment(num_tokens - len(turns[2]), num_tokens, 6),
    )


async def test_the_budget_counts_inserted_tokens(tokenization: Tokenization) -> None:
    engine = ScriptedEngine([(*spelled("ab"), END), spelled("x" * 500)])
    context = make_context(engine, tokenization, max_tokens=60)
    transcript = Transcript(context)
    await transcript.sample_turn()
    assert engine.requests[0].sampling.max_tokens == 60
    assert transcript.insert(FEEDBACK)
    turn = await transcript.sample_turn()
    assert turn.finish_reason == "length"
    assert len(transcript.episode("length").token_ids) == 60


async def test_the_budget_ends_at_the_models_length(tokenization: Tokenization) -> None:
    engine = ScriptedEngine([(*spelled("ab"), END), spelled("x" * 500)])
    length = len(make_context(engine, tokenization).prompt_token_ids) + 60
    transcript = Transcript(make_context(engine, tokenization, max_model_len=length))
    await transcript.sample_turn()
    transcript.insert(FEEDBACK)
    await transcript.sample_turn()
    assert len(transcript.episode("length").token_ids) == 60


@pytest.mark.parametrize(("spare", "fits"), [(0, False), (1, True)])
async def test_nothing_is_inserted_without_room_for_a_sampled_token(
    tokenization: Tokenization, spare: int, fits: bool
) -> None:
    turn = (*spelled("ab"), END)
    num_inserted = len(tokenization.next_ids(END, FEEDBACK))
    context = make_context(ScriptedEngine([turn]), tokenization, max_tokens=len(turn) + num_inserted + spare)
    transcript = Transcript(context)
    await transcript.sample_turn()
    assert transcript.insert(FEEDBACK) is fits
    assert transcript.room == (1 if fits else num_inserted)


async def test_an_episode_never_ends_with_inserted_tokens(tokenization: Tokenization) -> None:
    turn = (*spelled("ab"), END)
    transcript = Transcript(make_context(ScriptedEngine([turn]), tokenization))
    await transcript.sample_turn()
    transcript.insert(FEEDBACK)
    episode = transcript.episode("stop")
    assert tuple(episode.token_ids.tolist()) == turn
    assert episode.segments == (VersionSegment(0, len(turn), 0),)
    assert len(episode.log_probs) == len(episode.loss_mask) == len(turn)


async def test_messages_need_a_turn_before_them(tokenization: Tokenization) -> None:
    transcript = Transcript(make_context(ScriptedEngine([(*spelled("ab"), END)]), tokenization))
    with pytest.raises(PenstockError, match="without a turn before"):
        transcript.insert(FEEDBACK)
    await transcript.sample_turn()
    transcript.insert(FEEDBACK)
    with pytest.raises(PenstockError, match="without a turn before"):
        transcript.insert(FEEDBACK)


async def test_each_turn_of_a_sample_has_its_own_seed(tokenization: Tokenization) -> None:
    engine = ScriptedEngine([(*spelled("ab"), END)] * 3)
    transcript = Transcript(make_context(engine, tokenization, seed=5))
    for _ in range(3):
        await transcript.sample_turn()
        transcript.insert(FEEDBACK)
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[0] == 5
    assert len({*seeds, *range(5, 5 + 1024)}) == 1024 + 2, "no other sample of the prompt has them"


def test_arrays_have_the_types_of_a_trajectory(tokenization: Tokenization) -> None:
    episode = Transcript(make_context(ScriptedEngine([]), tokenization)).episode("aborted")
    assert (episode.token_ids.dtype, episode.loss_mask.dtype, episode.log_probs.dtype) == (
        np.int32, np.uint8, np.float32,
    )  # fmt: skip


class _ReportingEngine(ScriptedEngine):
    """Reports as experts of a token its place in the sequence, and the turn that reported it."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        turn, num_tokens = int(request.request_id.rpartition(".")[2]), len(request.prompt_token_ids)
        async for chunk in super().generate(request):
            num_tokens += len(chunk.token_ids)
            places = np.arange(num_tokens - 1, dtype=np.uint16)
            experts = np.stack([places, np.full_like(places, turn)], axis=1)[:, None, :]
            yield replace(chunk, routed_experts=None if chunk.finish_reason is None else experts)


async def test_experts_of_all_turns_are_joined_and_each_tokens_first_report_counts(tokenization: Tokenization) -> None:
    first, second = (*spelled("ab"), END), (*spelled("ok"), END)
    context = make_context(_ReportingEngine([first, second]), tokenization)
    transcript = Transcript(context)
    turn = await transcript.sample_turn()
    prompt = len(context.prompt_token_ids)
    alone = transcript.episode(turn.finish_reason).routed_experts
    assert alone is not None and len(alone) == prompt + len(first) - 1
    assert transcript.insert(FEEDBACK)
    cut = transcript.episode(turn.finish_reason).routed_experts
    assert cut is not None and len(cut) == len(alone), (
        "inserted tokens at the end are cut off, and so are their experts"
    )
    turn = await transcript.sample_turn()
    episode = transcript.episode(turn.finish_reason)
    experts = episode.routed_experts
    assert experts is not None and experts.shape == (prompt + len(episode.token_ids) - 1, 1, 2)
    assert experts[:, 0, 0].tolist() == list(range(len(experts)))
    assert experts[:, 0, 1].tolist() == [0] * len(alone) + [1] * (len(experts) - len(alone))


@pytest.mark.parametrize(
    ("stop", "text", "reason"), [(("ca",), "abca", "stop"), (("zz", "b"), "ab", "stop"), (("zz",), "abcabc", "stop")]
)
async def test_a_stop_text_ends_a_turn_with_the_token_that_completes_it(
    tokenization: Tokenization, stop: tuple[str, ...], text: str, reason: str
) -> None:
    engine = ScriptedEngine([(*spelled("abcabc"), END)])
    context = make_context(engine, tokenization)
    transcript = Transcript(replace(context, sampling=replace(context.sampling, stop=stop)))
    turn = await transcript.sample_turn()
    episode = transcript.episode(turn.finish_reason)
    assert (tokenization.text(episode.token_ids.tolist()), turn.finish_reason) == (text, reason)
    assert len(episode.log_probs) == len(episode.token_ids) == episode.segments[-1].end == episode.loss_mask.sum()
    assert not engine.running, "the request was aborted"
