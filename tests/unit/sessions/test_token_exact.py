"""Property: whatever a harness does with its history, exactly what the engine sampled is trained, each token once."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.conversion import chat_message
from penstock.codec import decode_group, encode_group
from penstock.config.service import ReplayConfig, SessionLimits
from penstock.store.ownership import RUN_ITSELF
from penstock.trajectory import Group, Sampling, Trajectory, VersionSegment
from penstock.v1 import generate_pb2, groups_pb2, prompts_pb2
from penstock_learner.loop.batches import reason_to_discard
from penstock_services.gateway.sessions.conversation_keys import message_keys
from penstock_services.gateway.sessions.recorder import SessionCall, SessionRecorder
from penstock_services.gateway.sessions.trajectories import RewardedTree, shared_prompts
from penstock_services.gateway.sessions.tree import SessionTree
from support.memory_sessions import MemorySessionStore

END, USER, TOOL, ASSISTANT, SPACE = 0, 1, 2, 3, 4
LETTERS = {"a": 5, "b": 6, "c": 7, "<": 9, ">": 10}
MERGED = 8
"""The id of `ab`. Encoding never gives the ids of `a` and `b` in a row, but an engine samples them."""
ROLES = {"user": USER, "tool": TOOL, "assistant": ASSISTANT}
SESSION = "s"


def encoded(text: str) -> list[int]:
    ids: list[int] = []
    for letter in text:
        if letter == "b" and ids and ids[-1] == LETTERS["a"]:
            ids[-1] = MERGED
        else:
            ids.append(SPACE if letter == " " else LETTERS[letter])
    return ids


def decoded(ids: list[int]) -> str:
    texts = {number: letter for letter, number in LETTERS.items()} | {SPACE: " ", MERGED: "ab", END: ""}
    return "".join(texts[token] for token in ids)


def rendered(messages: list[dict[str, Any]]) -> list[int]:
    return [token for message in messages for token in (ROLES[message["role"]], *encoded(message["content"]), END)]


@dataclass
class Sampled:
    """What the engine reported of a call, and what the harness knows of it."""

    prompt: list[int]
    ids: list[int]
    log_probs: list[float]
    versions: list[int]
    sampling: prompts_pb2.Sampling
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation with the answer; empty for a prompt of plain text or ids."""
    text: str = ""


@dataclass
class Engine:
    """Samples what hypothesis draws. All log-probs are different, so no two tokens can be taken for each other."""

    draw: Any
    num_tokens: int = 0
    calls: list[Sampled] = field(default_factory=list)

    def prompt_ids(self, request: generate_pb2.GenerateRequest) -> list[int]:
        history = np.frombuffer(request.history_token_ids, dtype="<i4").tolist()
        if request.text:
            kept = history[:-1] if history and history[-1] == END else history
            return [*kept, *encoded(request.text)]
        if request.token_ids:
            return np.frombuffer(request.token_ids, dtype="<i4").tolist()  # type: ignore[no-any-return]
        between = [END] if history and history[-1] != END else []
        return [*history, *between, *rendered([chat_message(m) for m in request.messages]), ASSISTANT]

    def answer(self, request: generate_pb2.GenerateRequest) -> tuple[Sampled, generate_pb2.GenerateChunk]:
        ids = self.draw(st.lists(st.sampled_from([5, 6, 7, 8, SPACE]), min_size=1, max_size=5))
        ends = self.draw(st.booleans())
        ids = [*ids, END] if ends else ids
        log_probs = [-(self.num_tokens + place + 1) / 1024 for place in range(len(ids))]
        self.num_tokens += len(ids)
        middle = self.draw(st.integers(0, len(ids)))
        version = self.draw(st.integers(0, 3))
        parts = [(0, middle, version), (middle, len(ids), version + 1)]
        sampled = Sampled(
            self.prompt_ids(request), ids, log_probs, [version] * middle + [version + 1] * (len(ids) - middle),
            request.sampling,
        )  # fmt: skip
        chunk = generate_pb2.GenerateChunk(
            text=decoded(ids),
            token_ids=np.array(ids, dtype="<i4").tobytes(),
            log_probs=np.array(log_probs, dtype="<f4").tobytes(),
            segments=[groups_pb2.VersionSegment(start=a, end=b, policy_version=v) for a, b, v in parts if b > a],
            finish_reason=groups_pb2.Trajectory.STOP if ends else groups_pb2.Trajectory.LENGTH,
            prompt_token_ids=np.array(sampled.prompt, dtype="<i4").tobytes(),
            server_id=self.draw(st.sampled_from(["r0", "r1"])),
        )
        self.calls.append(sampled)
        return sampled, chunk


@dataclass
class Running:
    """A call between the moment the gateway reads the session and the moment it records the answer."""

    recorder: SessionRecorder
    call: SessionCall
    request: generate_pb2.GenerateRequest
    continues: Sampled | None
    """The call whose history was sent back as it was, or in another form."""
    messages: list[dict[str, Any]]
    text: str


class Harness:
    """Talks over two gateways, in any order and with several calls at a time."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.engine = Engine(draw)
        self.store = MemorySessionStore(SessionLimits())
        small = MemorySessionStore(SessionLimits(cache_bytes=draw(st.sampled_from([0, 3000, 2**20]))))
        small._sessions = self.store._sessions
        self.recorders = [SessionRecorder(store) for store in (self.store, small)]  # type: ignore[arg-type]
        self.running: list[Running] = []

    async def begin(self) -> None:
        request = generate_pb2.GenerateRequest(
            session_id=SESSION,
            sampling=prompts_pb2.Sampling(
                temperature=self.draw(st.sampled_from([0.0, 0.6, 1.0])), top_p=self.draw(st.sampled_from([0.9, 1.0])),
                top_k=self.draw(st.sampled_from([0, 5])), max_tokens=9,
            ),
        )  # fmt: skip
        continues, messages, text = self._history()
        if messages:
            request.messages.extend(prompts_pb2.Message(role=m["role"], content=m["content"]) for m in messages)
        elif text:
            request.text = text
        else:
            chosen = self.draw(st.sampled_from(self.engine.calls)) if self.engine.calls else None
            ids = [*chosen.prompt, *chosen.ids, USER, 5] if chosen else [USER, 5]
            request.token_ids = np.array(ids, dtype="<i4").tobytes()
        recorder = self.draw(st.sampled_from(self.recorders))
        call = await recorder.prepare(request, RUN_ITSELF)
        self.running.append(Running(recorder, call, request, continues, messages, text))

    async def end(self) -> None:
        running = self.running.pop(self.draw(st.integers(0, len(self.running) - 1)))
        sampled, chunk = self.engine.answer(running.request)
        if running.continues is not None:
            before = [*running.continues.prompt, *running.continues.ids]
            assert sampled.prompt[: len(before)] == before, "the history is continued from the ids that were sampled"
        await running.recorder.record(running.call, chunk, running.request)
        if self.draw(st.booleans()):  # The answer of Redis was lost, and the gateway has tried again.
            await running.recorder.record(running.call, chunk, running.request)
        if running.messages:
            sampled.messages = [*running.messages, {"role": "assistant", "content": chunk.text}]
        sampled.text = running.text + chunk.text if running.text else ""

    def _history(self) -> tuple[Sampled | None, list[dict[str, Any]], str]:
        """The call that is continued, and the messages or the text that is sent; neither for a prompt of ids."""
        kind = self.draw(st.sampled_from(["new", "same", "same", "reworded", "edited", "cut", "retry", "text", "ids"]))
        question = {"role": self.draw(st.sampled_from(["user", "tool"])), "content": self.draw(words)}
        chats = [call for call in self.engine.calls if call.messages]
        texts = [call for call in self.engine.calls if call.text]
        if kind == "ids":
            return None, [], ""
        if kind == "text":
            before = self.draw(st.sampled_from(texts)).text if texts else ""
            return None, [], before + "<" + self.draw(words)
        if kind == "new" or not chats:
            return None, [question], ""
        # Two calls may have said the same with other ids. Then either may be continued, and the newest one is.
        chosen = self.draw(st.sampled_from(chats))
        twins = [call for call in chats if plain(call.messages) == plain(chosen.messages)]
        continues = chosen if len(twins) == 1 else None
        if kind == "same":
            return continues, [*chosen.messages, question], ""
        if kind == "reworded":
            return continues, [*map(reworded, chosen.messages), question], ""
        if kind == "retry":
            return None, chosen.messages[:-1], ""
        if kind == "cut":
            return None, [*chosen.messages[: self.draw(st.integers(0, len(chosen.messages) - 1))], question], ""
        edited = [dict(message) for message in chosen.messages]
        edited[self.draw(st.integers(0, len(edited) - 1))]["content"] += "c"
        return None, [*edited, question], ""


words = st.text("ab ", min_size=1, max_size=4)


def reworded(message: dict[str, Any]) -> dict[str, Any]:
    """The message with other white space: anywhere in what the model said, and else around it."""
    content = message["content"].replace(" ", "  ") if message["role"] == "assistant" else message["content"]
    return {**message, "content": f" {content} "}


def plain(messages: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    def content_of(message: dict[str, Any]) -> Any:
        return message["content"].split() if message["role"] == "assistant" else message["content"].strip()

    return [(message["role"], content_of(message)) for message in messages]


def group_of_session(harness: Harness) -> list[Group]:
    tree = SessionTree()
    tree.add(asyncio.run(harness.store.calls(SESSION)))
    made = shared_prompts([RewardedTree(tree, 0.5, {"part": 1.0})])
    groups = [Group("r", 1, 1, "s", "session", one.sampling, one.prompt_token_ids, one.trajectories) for one in made]
    return [decode_group(encode_group(group)) for group in groups]


def places_of(call: Sampled, group: Group, path: Trajectory) -> bool:
    """Whether the call is trained in this path, with everything that the engine reported."""
    everything = [*group.prompt_token_ids.tolist(), *path.token_ids.tolist()]
    first = len(call.prompt) - len(group.prompt_token_ids)
    last = first + len(call.ids)
    if first < 0 or everything[: len(call.prompt) + len(call.ids)] != [*call.prompt, *call.ids]:
        return False
    trained = slice(first, last)
    if path.log_probs[trained].tolist() != np.array(call.log_probs, dtype=np.float32).tolist():
        return False
    assert path.token_versions()[trained].tolist() == call.versions
    segments = path.sampling_segments or ()
    used = [s for s in segments if s.start < last and s.end > first] or [group.sampling]
    wanted = call.sampling
    for sampling in used:
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
            wanted.temperature, wanted.top_p, wanted.top_k, wanted.min_p,
        )  # fmt: skip
    return bool(path.loss_mask[trained].all())


@settings(max_examples=25)
@given(st.data())
def test_what_the_engine_sampled_is_trained_once_bit_for_bit(data: st.DataObject) -> None:
    check_a_session(data)


@pytest.mark.long
@settings(max_examples=1000)
@given(st.data())
def test_what_the_engine_sampled_is_trained_once_in_many_sessions(data: st.DataObject) -> None:
    check_a_session(data)


def check_a_session(data: st.DataObject) -> None:
    harness = Harness(data.draw)

    async def talk() -> None:
        for _ in range(data.draw(st.integers(1, 12))):
            if harness.running and data.draw(st.booleans()):
                await harness.end()
            elif data.draw(st.booleans()):
                await asyncio.gather(harness.begin(), harness.begin())
            else:
                await harness.begin()
        while harness.running:
            await harness.end()

    asyncio.run(talk())
    calls = harness.engine.calls
    if not calls:
        return
    groups = group_of_session(harness)
    paths = [(group, path) for group in groups for path in group.trajectories]
    for call in calls:
        assert sum(places_of(call, group, path) for group, path in paths) == 1, "each call is trained in one path"
    assert sum(int(path.loss_mask.sum()) for _, path in paths) == sum(len(call.ids) for call in calls)
    for _, path in paths:
        assert (path.log_probs[path.loss_mask == 0] <= 0).all() and path.loss_mask.any()
        assert (path.reward, path.reward_parts) == (0.5, {"part": 1.0})
    episodes = {path.episode for _, path in paths}
    assert episodes == ({0} if len(paths) == 1 else {1})


@pytest.mark.parametrize(
    ("sent", "matches"),
    [
        ({"content": "a b"}, True),
        ({"content": " a \n b "}, True),
        ({"content": "<think>c</think> a b"}, True),
        ({"content": "a"}, False),
        ({"content": "a b", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, False),
    ],
)
def test_an_answer_is_known_by_what_it_says(sent: dict[str, Any], matches: bool) -> None:
    async def second_history() -> bytes:
        recorder = SessionRecorder(MemorySessionStore())  # type: ignore[arg-type]
        question = prompts_pb2.Message(role="user", content="a")
        request = generate_pb2.GenerateRequest(session_id=SESSION, messages=[question])
        chunk = generate_pb2.GenerateChunk(
            text="a b", token_ids=np.array([5, 4, 6, 0], dtype="<i4").tobytes(),
            log_probs=np.zeros(4, dtype="<f4").tobytes(), prompt_token_ids=np.array([1], dtype="<i4").tobytes(),
        )  # fmt: skip
        await recorder.record(await recorder.prepare(request, RUN_ITSELF), chunk, request)
        fields = {name: value for name, value in sent.items() if name != "content"}
        answer = prompts_pb2.Message(role="assistant", content=sent["content"])
        if fields:
            answer.fields_json = json.dumps(fields)
        request = generate_pb2.GenerateRequest(session_id=SESSION, messages=[question, answer, question])
        await recorder.prepare(request, RUN_ITSELF)
        assert len(request.messages) == (1 if request.history_token_ids else 3)
        return request.history_token_ids

    history = asyncio.run(second_history())
    assert history == (np.array([1, 5, 4, 6, 0], dtype="<i4").tobytes() if matches else b"")


def test_arguments_of_a_call_are_known_in_every_form_that_clients_give_them() -> None:
    def key(arguments: str) -> bytes:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return message_keys([{"role": "assistant", "content": "", "tool_calls": [call]}]).by_text[-1]

    sampled = key('{"b": 1.0, "a": [1e3, 0.5, "\\u00e9"], "c": 0.0}')
    assert sampled == key('{"a":[1000,0.5,"é"],"b":1,"c":0}'), "as JavaScript writes it"
    others = ('{"b": 1.5, "a": [1e3, 0.5, "é"], "c": 0.0}', '{"b": "1", "a": []}', '{"b": 1e999}')
    assert len({sampled, *map(key, others)}) == 4


def test_a_session_with_many_paths_is_one_sample_of_its_group() -> None:
    """Dynamic sampling must not drop it for having no spread."""
    trajectory = Trajectory(
        np.array([5], dtype=np.int32), np.array([1], dtype=np.uint8), np.zeros(1, dtype=np.float32),
        (VersionSegment(0, 1, 0),), 1.0, episode=1,
    )  # fmt: skip
    group = Group("r", 1, 1, "s", "session", Sampling(), np.array([1], dtype=np.int32), (trajectory,) * 3)
    config = ReplayConfig(dynamic_sampling=True)
    assert reason_to_discard(group, config) == ""
    alone = replace(trajectory, episode=0)
    assert reason_to_discard(replace(group, trajectories=(alone,) * 3), config) == "no_spread"
