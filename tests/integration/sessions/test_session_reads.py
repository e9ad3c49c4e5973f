"""Sessions as the gateway shows them: over REST, gRPC and the Python client, and in the console."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import openai
import pytest

from penstock.api_keys import make_key
from penstock.client import PenstockClient
from penstock.errors import InvalidInput, NotFound
from penstock.v1 import sessions_pb2, sessions_pb2_grpc
from support.gateways import LAUNCH, SCREENSHOTS, Gateway, needs_chromium
from support.scripted_engines import ANSWER, TalkingEngine

Talking = tuple[Gateway, dict[str, TalkingEngine]]
SAID = {"role": "assistant", "content": "abc ok"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def converse(talking: Talking, session_id: str, *histories: Sequence[Any], versions: Sequence[int] = ()) -> None:
    """Make one call for each history, in order. Entry i of `versions` is the version of call i."""
    gateway, engines = talking
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
        for number, history in enumerate(histories):
            for engine in engines.values():
                engine.policy_version = versions[number] if versions else 3
            await client.chat.completions.create(
                model="test", messages=history, extra_headers={"X-Penstock-Session": session_id}
            )


FORKED = (
    [user("abc")],
    [user("abc"), SAID, user("ok")],
    [user("abc"), SAID, user("ok"), SAID, {"role": "tool", "content": "<b>ab</b>"}],
    [user("abc"), SAID, user("ab")],
    [user("other")],
)
"""Call 1 and call 3 continue call 0, call 2 continues call 1, and call 4 begins another conversation."""


@pytest.fixture
async def client(talking: Talking) -> AsyncIterator[PenstockClient]:
    gateway, _ = talking
    async with PenstockClient(gateway.url, api_key=gateway.key) as opened:
        yield opened


async def test_a_session_is_read_as_a_tree(talking: Talking, client: PenstockClient) -> None:
    await converse(talking, "s", *FORKED, versions=(3, 4, 5, 4, 3))
    session = await client.get_session("s")
    assert (session.state, session.reward, session.num_calls, session.task_id) == ("OPEN", None, 5, "")
    assert [call.parent for call in session.calls] == [None, 0, 1, 0, None]
    assert [path.calls for path in session.paths] == [(0, 1, 2), (0, 3), (4,)]
    assert [path.trained_calls for path in session.paths] == [(0, 1, 2), (3,), (4,)]
    assert [path.num_trained_tokens for path in session.paths] == [3 * len(ANSWER), len(ANSWER), len(ANSWER)]
    assert [set(call.policy_versions) for call in session.calls] == [{3}, {4}, {5}, {4}, {3}]
    _, engines = talking
    [engine] = [each for each in engines.values() if each.requests]
    ids: dict[int | None, tuple[int, ...]] = {None: ()}
    for call, asked, log_probs in zip(session.calls, engine.requests, engine.sampled, strict=True):
        assert call.token_ids == ANSWER and call.log_probs == log_probs
        prompt = ids[call.parent] + call.inserted_token_ids
        assert prompt == tuple(asked.prompt_token_ids), "a parent's tokens and what was inserted are the prompt"
        assert (call.num_prompt_tokens, call.num_inserted, call.num_sampled) == (
            len(prompt), len(call.inserted_token_ids), len(ANSWER)
        )  # fmt: skip
        assert "".join(call.tokens).startswith("abc ok") and len(call.inserted_tokens) == call.num_inserted
        ids[call.number] = prompt + call.token_ids


async def test_the_tokens_of_a_session_are_bounded(talking: Talking, client: PenstockClient) -> None:
    await converse(talking, "s", *FORKED)
    whole = await client.get_session("s")
    first = whole.calls[0].num_inserted + whole.calls[0].num_sampled
    some = await client.get_session("s", max_tokens=first + 2)
    assert some.calls[0] == whole.calls[0] and some.paths == whole.paths
    assert some.calls[1].inserted_token_ids == whole.calls[1].inserted_token_ids[:2]
    assert [len(call.inserted_token_ids) + len(call.token_ids) for call in some.calls] == [first, 2, 0, 0, 0]
    later = await client.get_session("s", from_call=3)
    assert later.calls[3:] == whole.calls[3:] and not any(call.token_ids for call in later.calls[:3])
    with pytest.raises(InvalidInput, match="max_tokens"):
        await client.get_session("s", max_tokens=100_001)


async def test_states_and_lists_of_sessions(talking: Talking, client: PenstockClient) -> None:
    [task_id] = await client.submit_tasks([{}], 2)
    [one, other] = await client.lease_tasks("w", 2)
    for session_id in ("alone", one.session_id, other.session_id):
        await converse(talking, session_id, FORKED[0])
    page = await client.sessions(page_size=2)
    rest = await client.sessions(page_size=2, page_token=page.next_page_token)
    assert [each.session_id for each in (*page.sessions, *rest.sessions)] == [
        other.session_id, one.session_id, "alone"
    ]  # fmt: skip
    assert [each.task_id for each in (*page.sessions, *rest.sessions)] == [task_id, task_id, ""]
    assert not rest.next_page_token

    await client.reward_session(one.session_id, 0.5, {"tests": 1.0})
    waiting = await client.get_session(one.session_id)
    assert (waiting.state, waiting.reward, waiting.reward_parts) == ("REWARDED", 0.5, {"tests": 1.0})
    assert [path.reward for path in waiting.paths] == [0.5] and waiting.calls[0].token_ids == ANSWER
    answer = await client.reward_session(other.session_id, 1.0)
    finished = await client.get_session(one.session_id)
    assert (finished.state, finished.prompt_ids, finished.calls) == ("FINISHED", answer.prompt_ids, ())
    assert [each.session_id for each in (await client.sessions()).sessions] == ["alone"]
    with pytest.raises(NotFound, match="no session 'unknown'"):
        await client.get_session("unknown")


async def test_sessions_are_read_over_grpc_and_need_a_key(talking: Talking, client: PenstockClient) -> None:
    gateway, _ = talking
    await converse(talking, "s", FORKED[0])
    stub: Any = sessions_pb2_grpc.SessionServiceStub(gateway.channel)
    read = await stub.GetSession(sessions_pb2.GetSessionRequest(session_id="s"))
    assert read.summary.state == sessions_pb2.SessionSummary.OPEN and len(read.calls) == 1
    listed = await stub.ListSessions(sessions_pb2.ListSessionsRequest())
    assert [each.session_id for each in listed.sessions] == ["s"]
    wrong, _ = make_key("stranger", "read")
    for path in ("/v1/sessions", "/v1/sessions/s"):
        refused = await gateway.rest.get(path, headers={"Authorization": f"Bearer {wrong}"})
        assert refused.status_code == 401
    with pytest.raises(grpc.aio.AioRpcError, match="from_call"):
        await stub.GetSession(sessions_pb2.GetSessionRequest(session_id="s", from_call=-1))


@needs_chromium
async def test_the_console_shows_a_session_as_a_tree(talking: Talking, client: PenstockClient) -> None:
    from playwright.async_api import async_playwright

    gateway, _ = talking
    await client.submit_tasks([{}], 2, idempotency_key="one")
    [leased, _] = await client.lease_tasks("w", 2)
    await converse(talking, leased.session_id, *FORKED, versions=(3, 4, 5, 4, 3))
    await converse(talking, "second", FORKED[0])
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(**LAUNCH)
        page = await browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(60_000)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        await page.goto(f"{gateway.url}/#key={gateway.key}")
        await page.get_by_role("link", name="Sessions").click()
        await page.get_by_role("button", name=leased.session_id).click()
        await page.get_by_role("heading", name=f"Session {leased.session_id}").wait_for()

        tree = page.locator(".tree")
        assert await tree.locator(":scope > ul").count() == 2, "the last call begins another conversation"
        forked = tree.get_by_label("call 0", exact=True)
        assert await forked.locator(":scope > ul.forks > li").count() == 2
        assert await forked.get_by_text("fork: 2 calls continue it").count() == 1
        line = forked.locator(":scope > ul.forks > li").first.locator(":scope > ul > li")
        assert [await each.get_attribute("aria-label") for each in await line.all()] == ["call 1", "call 2"]
        kinds = [
            [await token.get_attribute("class") for token in await row.locator("span").all()]
            for row in await tree.locator(".tokens").all()
        ]
        assert [sorted(set(each)) for each in kinds] == [
            ["inserted", version] for version in ("v0", "v1", "v2", "v1", "v0")
        ]  # fmt: skip
        assert all(each.count("inserted") + len(ANSWER) == len(each) for each in kinds)
        assert "<b>ab</b>" in await tree.get_by_label("call 2").locator(".tokens").inner_text(), "never as HTML"
        legend = await page.locator(".legend").inner_text()
        assert re.findall(r"version \d", legend) == ["version 3", "version 4", "version 5"]
        state = page.get_by_role("group", name="State")
        assert "OPEN" in await state.inner_text() and "0 of 2 rewarded" in await state.inner_text()
        assert await page.get_by_text("End of path 0: no reward yet").count() == 1
        await tree.locator(".tokens span").first.focus()
        await page.keyboard.press("ArrowRight")
        assert "inserted before call 0" in await page.locator("#announcement").inner_text()

        await client.reward_session(leased.session_id, 0.25)
        for theme, width in (("light", 1200), ("dark", 1200), ("light", 380)):
            await page.set_viewport_size({"width": width, "height": 900})
            if await page.locator("html").get_attribute("data-theme") != theme:
                await page.get_by_role("button", name="Switch between light and dark").click()
            await page.reload()
            await page.get_by_text("End of path 2: reward 0.25").wait_for()
            if SCREENSHOTS:
                await page.screenshot(path=f"{SCREENSHOTS}/session-{theme}-{width}.png", full_page=True)
            too_wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            assert not await page.evaluate(too_wide), width
            cut = "[...document.querySelectorAll('.scroll')].some(e => e.scrollWidth > e.clientWidth)"
            assert not await page.evaluate(cut), f"a table is cut at {width}"
        paths = page.get_by_role("region", name="Paths and their rewards")
        assert await paths.get_by_text("0 → 1 → 2").count() == 1

        await page.get_by_label("Session", exact=True).fill("second")
        await page.keyboard.press("Enter")
        await page.get_by_role("heading", name="Session second").wait_for()
        [prompt_id] = (await client.reward_session("second", 1.0)).prompt_ids
        await page.get_by_role("button", name="Apply").click()
        await page.get_by_text("its calls are forgotten").wait_for()
        await page.get_by_role("button", name=f"Group of prompt {prompt_id}").click()
        await page.get_by_role("heading", name=f"Group of prompt {prompt_id}").wait_for()
        await browser.close()
    assert problems == []
