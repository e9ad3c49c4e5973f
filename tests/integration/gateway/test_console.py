"""The console in a real browser: what it shows, what it does, and its use without a mouse."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import redis.asyncio as redis

from penstock.api_keys import make_key
from penstock.codec import decode_group, encode_group, sampling_to_proto
from penstock.config.service import RedisConfig, SessionLimits
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.results import RecomputedLogProbs
from penstock.samples import Sample
from penstock.sessions.session_store import Reward, SessionStore
from penstock.sessions.task_store import TaskStore
from penstock.store.fleet import Fleet, PolicyRegistry, RunControl, ServerRecord
from penstock.store.notices import Event, Notices
from penstock.store.redis_client import connect
from penstock.trajectory import Sampling
from penstock.v1 import groups_pb2, policies_pb2, sessions_pb2, tasks_pb2
from support.gateways import LAUNCH, PROMPT, RUN, SCREENSHOTS, Gateway, group_of, needs_chromium, run_config, running
from support.groups import group_of_samples, write_samples
from support.redis_server import RedisProcess
from support.scripted_engines import make_tokenizer_folder, spelled

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="module")]  # the browser is of one loop


async def fill(queue: RedisReplayQueue, gateway: Gateway, headers: dict[str, str]) -> None:
    """Forty steps, three servers, two groups, a dead letter, samples of two steps and of a validation."""
    held_out = sampled(10, 3, 0.75, 0.0, data_source="held-out", validation="train")
    write_samples(gateway.config.folder / "validation", held_out)
    write_samples(
        gateway.config.folder, sampled(11, 7, 0.25, prompt="old?"), sampled(12, 8, 1.0, 0.0, data_source="sums")
    )
    prompts = {"prompts": [PROMPT] * 5}
    assert (await gateway.rest.post(f"{RUN}/prompts", json=prompts, headers=headers)).status_code == 200
    leases = await queue.lease("rollout-0", 3)
    for lease in leases[:2]:
        group = group_of(lease.prompt_id, lease.attempt)
        words = "<b>ok</b>"
        trajectory = replace(
            group.trajectories[0],
            token_ids=np.array(spelled(words), dtype=np.int32),
            loss_mask=np.ones(len(words), dtype=np.uint8),
            log_probs=-np.linspace(0, 6, len(words), dtype=np.float32),
            segments=tuple(replace(s, end=len(words) if s.end == 3 else s.end) for s in group.trajectories[0].segments),
        )
        await queue.append(lease, encode_group(replace(group, trajectories=(trajectory,) * 2)), 3)
    await queue.give_back("rollout-0", leases[2], "reward_failed: <script>alert(1)</script>", is_final=True)
    await queue.take_term(0)
    for version in range(1, 41):
        reward, noise = 1 - 0.9 ** (version / 4), np.sin(version) / 20
        policy = policies_pb2.Policy(
            policy_version=version, step=version, weights_digest="ab", state=policies_pb2.Policy.PUBLISHED,
            snapshot_path="/snapshots/x" if version % 10 == 0 else "",
            published_at_ms=1_790_000_000_000 + version * 60_000,
            metrics={"reward_mean": reward + noise, "staleness_mean": 1 + noise, "tokens_per_second": 900 + noise},
        )  # fmt: skip
        await queue.publish(version, version, policy.SerializeToString())
    fleet = Fleet(queue.client, "test")
    for name, state, version in (("rollout-0", "READY", 40), ("rollout-1", "LOADING", 39), ("rollout-2", "STALE", 30)):
        await fleet.join(ServerRecord(name, "127.0.0.1:1", "vllm", policy_version=version, running_groups=3))
        await fleet.set_state(name, state)  # type: ignore[arg-type]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    made, key = make_key("browser", "admin")
    (tmp_path / "keys").write_text(key.line)
    return made


@pytest_asyncio.fixture(loop_scope="module")
async def redis_client(redis_process: RedisProcess) -> AsyncIterator[redis.Redis]:
    """The same as in conftest.py, in the loop of this file."""
    client = connect(RedisConfig(url=redis_process.url, timeout_s=200))
    await client.flushdb()
    yield client
    await client.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path, queue: RedisReplayQueue, secret: str
) -> AsyncIterator[Gateway]:
    make_tokenizer_folder(tmp_path)
    async with running(run_config(redis_process.url, tmp_path, keys_file=tmp_path / "keys")) as started:
        await fill(queue, started, {"Authorization": f"Bearer {secret}"})
        yield started


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Any]:
    """One for all tests, because its start takes seconds. Each page has its own storage."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(**LAUNCH)
        yield started
        await started.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(gateway: Gateway, secret: str, browser: Any) -> AsyncIterator[Any]:
    """A page with its key. A request to another host, or an error in a script, fails the test."""
    made = await browser.new_page(viewport={"width": 1200, "height": 900})
    made.set_default_timeout(60_000)
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("request", lambda sent: sent.url.startswith(gateway.url) or problems.append(sent.url))
    await made.goto(gateway.url)
    await made.get_by_label("Key", exact=True).fill(secret)
    await made.get_by_role("button", name="Use key").click()
    await made.locator("main[data-view=overview]").wait_for()
    yield made
    await made.unroute_all(behavior="ignoreErrors")
    await made.close()
    assert problems == []


async def keep(page: Any, name: str) -> None:
    if SCREENSHOTS:
        await page.screenshot(path=f"{SCREENSHOTS}/{name}.png", full_page=True)


async def test_every_view_in_light_dark_and_narrow(page: Any, gateway: Gateway) -> None:
    for theme, width in (("light", 1200), ("dark", 1200), ("light", 380)):
        await page.set_viewport_size({"width": width, "height": 900})
        if await page.locator("html").get_attribute("data-theme") != theme:
            await page.get_by_role("button", name="Switch between light and dark").click()
        for view, heading in (
            ("Overview", "Versions by server"), ("Policies", "Policies"), ("Trajectories", "Waiting for the learner"),
            ("Samples", "Trained samples"), ("Dead letters", "Dead letters"),
        ):  # fmt: skip
            await page.get_by_role("link", name=view).click()
            await page.get_by_role("heading", name=heading, exact=True).wait_for()
            assert await page.get_by_role("link", name=view).get_attribute("aria-current") == "page"
            if view == "Trajectories":
                await page.get_by_role("button", name="Prompt 1").click()
                await page.get_by_role("heading", name="Group of prompt 1").wait_for()
            if view == "Samples":
                await page.locator("details.sample summary").first.click()
                await page.get_by_role("heading", name="Ground truth").first.wait_for()
            await keep(page, f"{view.lower().replace(' ', '-')}-{theme}-{width}")
            too_wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            assert not await page.evaluate(too_wide), f"{view} at {width}"
            cut = "[...document.querySelectorAll('.scroll')].some(e => e.scrollWidth > e.clientWidth)"
            assert not await page.evaluate(cut), f"a table of {view} is cut at {width}"


def sampled(step: int, prompt_id: int, *rewards: float, **changes: Any) -> list[Sample]:
    return group_of_samples(step, prompt_id, *rewards, response="<b>" + "long " * 50, **changes)


async def open_view(page: Any, name: str) -> None:
    await page.get_by_role("link", name=name).click()
    await page.locator(f"main[data-view={name.lower()}]").wait_for()


async def test_samples_are_shown_with_prompt_and_truth_filtered_and_paged(page: Any, gateway: Gateway) -> None:
    await open_view(page, "Samples")
    summaries = page.locator("details.sample summary")
    assert [(await each.inner_text()).partition(" · prompt")[0] for each in await summaries.all()] == [
        "reward 1 (format 0.5) · step 12", "reward 0 (format 0.5) · step 12", "reward 0.25 (format 0.5) · step 11",
    ]  # fmt: skip
    await summaries.first.click()
    opened = page.locator("details[open]")
    assert await opened.get_by_label("Prompt").locator("pre").inner_text() == "<|user|>2 + 3?"
    assert await opened.get_by_label("Ground truth").locator("pre").inner_text() == "5"
    assert (await opened.get_by_label("Response").locator("pre").inner_text()).startswith("<b>long"), "never as HTML"

    apply = page.get_by_role("button", name="Apply")
    await page.get_by_label("Order").select_option("WORST")
    await apply.click()
    await page.locator("details.sample").first.filter(has_text="reward 0 (").wait_for()
    await page.get_by_label("Order").select_option("")
    await page.get_by_label("Data source").fill("sums")
    await apply.click()
    await page.get_by_text("step 11").wait_for(state="detached")
    assert await summaries.count() == 2
    await page.get_by_label("Data source").fill("")
    await page.get_by_label("Highest reward").fill("0.5")
    await page.keyboard.press("Enter")
    await page.get_by_text("reward 1 (").wait_for(state="detached")
    assert await summaries.count() == 2
    await page.get_by_label("Text", exact=True).fill("no such")
    await apply.click()
    await page.get_by_text("No sample matches here.").wait_for()

    await page.get_by_label("Text", exact=True).fill("")
    await page.get_by_label("Samples of").select_option("true")
    await apply.click()
    await page.get_by_role("heading", name="Samples of validations").wait_for()
    assert await summaries.count() == 1, "the filters hold for both"
    await page.get_by_label("Highest reward").fill("")
    await apply.click()
    await page.get_by_text("reward 0.75 (format 0.5) · validation · step 10 · prompt 3.0 · held-out").wait_for()
    await summaries.first.click()
    await keep(page, "samples-validation")

    write_samples(gateway.config.folder, *(sampled(20 + n, 100 + n, 0.5) for n in range(30)), start_step=12)
    await page.reload()
    await page.get_by_role("button", name="Older").wait_for()
    assert await summaries.count() == 20 and "step 49" in await summaries.first.inner_text()
    await page.get_by_role("button", name="Older").click()
    await page.get_by_text("step 29").wait_for()
    assert await page.get_by_role("button", name="Older").count() == 0
    await page.get_by_role("button", name="Newest").click()
    await page.get_by_text("step 49").wait_for()


async def test_groups_that_wait_are_apart_from_those_that_the_learner_took(
    page: Any, gateway: Gateway, queue: RedisReplayQueue
) -> None:
    assert await queue.take(41, 1) == [1]
    await open_view(page, "Trajectories")
    waiting = page.get_by_role("region", name="Groups that wait for the learner")
    taken = page.get_by_role("region", name="Groups that no checkpoint covers yet")
    assert await waiting.get_by_role("button").all_inner_texts() == ["Prompt 2"]
    assert await taken.get_by_role("button").all_inner_texts() == ["Prompt 1"]
    await page.get_by_role("button", name="Prompt 2").click()
    await page.get_by_label("Ground truth").wait_for()
    asked = PROMPT["messages"][0]  # type: ignore[index]
    assert await page.get_by_label("Prompt", exact=True).locator("pre").inner_text() == f"user: {asked['content']}"
    shown = await page.get_by_label("Ground truth").locator("pre").inner_text()
    assert json.loads(shown) == PROMPT["ground_truth"]

    await page.get_by_label("Lowest reward").fill("1.5")
    await page.get_by_role("button", name="Apply").click()
    await page.get_by_text("No group waits for the learner.").wait_for()
    assert await taken.count() == 0


async def test_validations_and_reward_parts_have_curves(page: Any, queue: RedisReplayQueue) -> None:
    for step, reward in ((0, 0.25), (10, 0.5)):
        await queue.create_evaluation(f"validation-math-{step}", [b"q"])
        [lease] = [each for each in await queue.lease("rollout-9", 9) if each.payload == b"q"]
        await queue.record_evaluation(f"validation-math-{step}", lease, [reward], 0, 0)
    metrics = {"reward_mean": 0.5, "reward_part/format": 0.75, "lr": 1e-6}
    policy = policies_pb2.Policy(policy_version=41, step=41, metrics=metrics)
    await queue.publish(41, 41, policy.SerializeToString())
    await page.get_by_role("img", name="held-out score, dataset math: 2 points, from 0.25 to 0.5").wait_for()
    await page.get_by_role("img", name="reward part format: 1 points, from 0.75 to 0.75").wait_for()
    await page.get_by_role("img", name="learning rate: 1 points, from 1e-6 to 1e-6").wait_for()
    assert await page.get_by_role("img", name="entropy").count() == 0, "no step has it"


async def test_a_button_is_not_replaced_under_the_mouse(page: Any, gateway: Gateway) -> None:
    await page.clock.install()
    await page.clock.pause_at(datetime.now(UTC) + timedelta(hours=1))  # only `run_for` moves the clock from here on
    await page.reload()
    await page.get_by_role("button", name=re.compile("Pause|Resume")).hover()
    asked: list[str] = []
    page.on("request", lambda sent: asked.append(sent.url))
    await page.clock.run_for(10_000)
    assert asked == [], "a click on a button that is replaced meanwhile would be lost"
    await page.mouse.move(1, 1)
    async with page.expect_request("**/metrics?*"):
        await page.clock.run_for(2_500)


async def test_the_overview_shows_the_run_and_leads_to_others(
    page: Any, gateway: Gateway, queue: RedisReplayQueue, secret: str
) -> None:
    assert await page.locator("#run-name").inner_text() == "test"
    charts = await page.get_by_role("img").all()
    labels = [await chart.get_attribute("aria-label") for chart in charts]
    assert [label.partition(":")[0] for label in labels] == [
        "reward", "staleness (versions)", "tokens per second", "groups ready",
    ]  # fmt: skip
    assert "40 points" in labels[0]
    row = page.get_by_role("row").filter(has_text="rollout-2")
    assert "STALE" in await row.inner_text() and "10 behind" in await row.inner_text()

    await queue.submit([b"p"] * 4, [0] * 4, "")
    for _ in range(queue.config.breaker.failures):
        for lease in await queue.lease("rollout-1", 4):
            await queue.give_back("rollout-1", lease, "reward_failed")
    await page.get_by_text("rollout-1 leases nothing: its last").wait_for()
    await page.get_by_role("row").filter(has_text="LOADING, leasing paused").wait_for()
    await page.get_by_role("button", name="Resume").wait_for()


async def test_a_version_is_promoted_and_servers_rewound(page: Any, gateway: Gateway, queue: RedisReplayQueue) -> None:
    await page.get_by_role("link", name="Policies").click()
    await page.get_by_role("button", name="Promote version 40").click()
    await page.get_by_role("button", name="promote", exact=True).click()
    await page.get_by_text("promoted", exact=True).wait_for()
    assert await page.get_by_role("button", name="Rewind version 39").is_disabled(), "it has no snapshot"
    await page.get_by_role("button", name="Rewind version 30").click()
    await page.get_by_role("button", name="rewind", exact=True).click()
    await page.get_by_text("Servers are held at version 30.").wait_for()
    registry = PolicyRegistry(queue.client, "test")
    assert await registry.kept_versions() == {40, 30}
    await page.get_by_role("button", name="Release").click()
    await page.get_by_role("button", name="release", exact=True).click()
    await page.get_by_text("Servers are held").wait_for(state="detached")
    assert await registry.kept_versions() == {40, 30}, "the learner may have yet to rewind to it"


async def test_tokens_are_coloured_and_walked_by_keyboard(page: Any, gateway: Gateway, queue: RedisReplayQueue) -> None:
    await page.get_by_role("link", name="Trajectories").focus()
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name="Prompt 1").focus()
    await page.keyboard.press("Enter")
    tokens = page.locator(".tokens").first
    assert await tokens.inner_text() == "<b>ok</b>", "text is never read as HTML"
    classes = [await token.get_attribute("class") for token in await tokens.locator("span").all()]
    assert classes == ["v0"] * 2 + ["v1"] * 7
    await tokens.locator("span").first.focus()
    await page.keyboard.press("ArrowRight")
    await page.keyboard.press("ArrowRight")
    assert "token 2: version 4" in await page.locator("#announcement").inner_text()
    await page.get_by_label("Colour by").select_option("log-prob")
    await page.get_by_text("The stronger the colour").wait_for()
    backgrounds = {
        await token.evaluate("e => getComputedStyle(e).backgroundColor")
        for token in await page.locator(".tokens").first.locator("span").all()
    }
    assert len(backgrounds) > 5

    await page.get_by_label("Colour by").select_option("mismatch")
    await page.get_by_text("has not computed this group's log-probs").wait_for()
    group = decode_group(await queue.get_group(1))
    differing = np.concatenate([t.log_probs for t in group.trajectories])
    differing[4] -= 0.5
    await RecomputedLogProbs(queue.client, "test").keep([group], differing)
    await page.get_by_label("Colour by").select_option("version")
    await page.get_by_label("Colour by").select_option("mismatch")
    await page.get_by_text("differs from the engine's").wait_for()
    colours = [
        await token.evaluate("e => getComputedStyle(e).backgroundColor")
        for token in await page.locator(".tokens").first.locator("span").all()
    ]
    assert [place for place, colour in enumerate(colours) if colour != colours[0]] == [4]


async def test_a_dead_letter_is_requeued(page: Any, gateway: Gateway, queue: RedisReplayQueue) -> None:
    await page.get_by_role("link", name="Dead letters").click()
    await page.get_by_text("<script>alert(1)</script>").wait_for()
    assert "reward_failed 1" in " ".join(
        (await page.get_by_role("region", name="Dead letters by reason").inner_text()).split()
    )
    await page.get_by_label("Reason", exact=True).select_option("reward_failed")
    await page.get_by_role("button", name="Apply").click()
    await page.get_by_role("button", name="Requeue prompt 3").click()
    await page.get_by_role("button", name="requeue", exact=True).click()
    await page.get_by_text("There are no dead letters.").wait_for()
    assert (await queue.get_prompt(6)).state == "pending"


async def test_a_gateway_that_is_gone_is_reported(page: Any, gateway: Gateway) -> None:
    await page.route("**/v1/**", lambda route: route.abort())
    await page.get_by_role("link", name="Dead letters").click()
    await page.get_by_role("alert").filter(has_text="The gateway does not answer.").wait_for()


MARKUP = (
    "</script></textarea><script>window.hacked=1</script><img src=x onerror=window.hacked=2>"
    "<svg onload=window.hacked=3><a id=bait href=javascript:window.hacked=4>[bait](javascript:window.hacked=5)</a>"
)


async def store_markup(queue: RedisReplayQueue, gateway: Gateway) -> None:
    """Put markup into every text of a client, a model, a reward or a server that a view shows."""
    write_samples(
        gateway.config.folder,
        group_of_samples(13, 9, 1.0, response=MARKUP, prompt=MARKUP, ground_truth=MARKUP, data_source=MARKUP[:200]),
    )
    prompt = PROMPT | {"messages": [{"role": "user", "content": MARKUP}], "priority": 9, "ground_truth": MARKUP}
    assert (await gateway.rest.post(f"{RUN}/prompts", json={"prompts": [prompt] * 2})).status_code == 200
    bad, good = await queue.lease("rollout-0", 2)
    await queue.give_back("rollout-0", bad, f"reward_failed: {MARKUP}", is_final=True)
    group = group_of(good.prompt_id, good.attempt)
    trajectory = replace(group.trajectories[0], reward_parts={MARKUP: 1.0})
    await queue.append(good, encode_group(replace(group, trajectories=(trajectory,), data_source=MARKUP)), 3)
    await Notices(queue.client, "test").record(Event("reward_failed", "place", MARKUP, MARKUP))
    await store_session(queue.client)
    await RunControl(queue.client, "test").pause(MARKUP)
    await Fleet(queue.client, "test").join(ServerRecord(MARKUP, MARKUP, MARKUP, devices=(MARKUP,)))
    await queue.record_scores(40, {MARKUP: 1.0})
    policy = policies_pb2.Policy(
        policy_version=41, step=41, weights_digest=MARKUP, state=policies_pb2.Policy.PUBLISHED, snapshot_path=MARKUP,
        metrics={MARKUP: 1.0, "reward_mean": 0.5},
    )  # fmt: skip
    await queue.publish(41, 41, policy.SerializeToString())


async def store_session(client: Any) -> None:
    """A session of one call, which has its reward and waits for another session of its task."""
    ids = np.array(spelled("<b>ok</b>"), dtype="<i4").tobytes()
    call = sessions_pb2.SessionCall(
        call_id="c", base=-1, extra_token_ids=ids, token_ids=ids, log_probs=bytes(len(ids)), server_id=MARKUP,
        segments=[groups_pb2.VersionSegment(end=len(ids) // 4, policy_version=3)],
        sampling=sampling_to_proto(Sampling()), finish_reason=groups_pb2.Trajectory.STOP,
    )  # fmt: skip
    sessions = SessionStore(client, "test", 3600, SessionLimits())
    await sessions.record("s", call.SerializeToString(), "c")
    task = tasks_pb2.NewTask(task_id="t", payload_json=json.dumps(MARKUP), num_sessions=2)
    await TaskStore(client, "test", 3600, SessionLimits()).submit([task], "", "")
    await sessions.close("s", Reward(1.0, {MARKUP: 1.0}), "t")


async def test_stored_markup_is_shown_and_not_run(
    gateway: Gateway, queue: RedisReplayQueue, secret: str, browser: Any
) -> None:
    """Without the content security policy, so that the views themselves must be right."""
    gateway.rest.headers["Authorization"] = f"Bearer {secret}"
    await store_markup(queue, gateway)
    page = await browser.new_page(bypass_csp=True)
    page.set_default_timeout(60_000)
    foreign: list[str] = []
    page.on("request", lambda sent: sent.url.startswith(gateway.url) or foreign.append(sent.url))
    page.on("dialog", lambda dialog: foreign.append(dialog.message))
    await page.goto(f"{gateway.url}/#key={secret}")
    for view in ("Overview", "Policies", "Trajectories", "Samples", "Sessions", "Dead letters"):
        await page.get_by_role("link", name=view).click()
        await page.locator(f"main[data-view={view.lower().replace(' ', '-')}]").wait_for()
        await page.evaluate("document.querySelectorAll('main details').forEach(e => { e.open = true; })")
        if view == "Trajectories":
            await page.get_by_role("button", name="Prompt 7", exact=True).click()
            await page.get_by_role("heading", name="Group of prompt 7").wait_for()
        if view == "Sessions":
            await page.get_by_role("button", name="s", exact=True).click()
            await page.get_by_role("heading", name="Session s").wait_for()
        await page.wait_for_function("document.body.outerHTML.includes('onerror=window.hacked')")
        made = "[...document.querySelectorAll('#bait, [onerror], [onload], [href^=javascript]')].length"
        assert await page.evaluate(f"[window.hacked ?? 0, {made}]") == [0, 0], view
    await page.close()
    assert foreign == []
