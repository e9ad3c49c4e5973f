"""The console on a run that trains. It colours tokens by how much the learner's log-probs differ from the engine's."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from penstock.api.records import Group
from penstock.client import SyncPenstockClient
from support.gateways import LAUNCH, SCREENSHOTS, needs_chromium
from support.processes import DemoProcess

pytestmark = [pytest.mark.timeout(400), pytest.mark.long, needs_chromium]  # test_console.py colours made-up tokens
FULL_COLOUR_NATS = 0.5
"""The difference at which the console's legend says the colour is full."""


def recomputed_group(client: SyncPenstockClient, timeout_s: float = 120) -> Group:
    """A trained group that no checkpoint covers yet, with the learner's log-probs."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for summary in client.groups().groups:
            group = client.get_group(summary.prompt_id)
            if group.trajectories[0].learner_log_probs:
                return group
        time.sleep(0.5)
    raise AssertionError("the learner has recomputed no group that is still kept")


def test_tokens_are_coloured_by_how_much_the_learner_differs(tmp_path: Path) -> None:
    """The engine computes in bfloat16 and the learner in float32, so the log-probs really differ."""
    overrides = {
        "rollout.engine.name": "torch", "model.dtype": "bfloat16", "learner.compute_dtype": "float32",
        "learner.policy.num_ranks": "1", "learner.algorithm.kl.placement": "none",
        "learner.algorithm.correction.mode": "decoupled", "learner.checkpoint.every_steps": "100000",
        "learner.num_steps": "100000", "replay.groups_per_step": "8",
    }  # fmt: skip
    run = DemoProcess(tmp_path, *(word for name, value in overrides.items() for word in (f"--{name}", value)))
    try:
        run.wait_for_step(2)
        with SyncPenstockClient.from_run_dir(run.folder) as client:
            client.pause_run()
            group = recomputed_group(client)
            shown = shares_in_the_console(f"{client.address.url}/#key={client.address.api_key}", group)
    finally:
        run.end()
    for trajectory, shares in zip(group.trajectories, shown, strict=True):
        differences = [
            abs(theirs - own) / FULL_COLOUR_NATS
            for theirs, own in zip(trajectory.learner_log_probs, trajectory.log_probs, strict=True)
        ]
        assert shares == [pytest.approx(100 * min(1, difference), abs=0.51) for difference in differences]
    assert len({share for shares in shown for share in shares}) > 1, "some differ more than others"


def shares_in_the_console(url: str, group: Group) -> list[list[int]]:
    """The strength of each token's colour in percent. Also checks that the browser paints it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**LAUNCH)
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.set_default_timeout(20_000)
        page.goto(url)
        page.get_by_role("link", name="Trajectories").click()
        page.get_by_role("button", name=f"Prompt {group.prompt_id}", exact=True).click()
        page.get_by_label("Colour by").select_option("mismatch")
        page.get_by_text("differs from the engine's").wait_for()
        shares, painted = [], set()
        for sample in page.locator(".tokens").all():
            tokens = sample.locator("span").all()
            styles = [token.get_attribute("style") or "" for token in tokens]
            shares.append([int(re.search(r"var\(--low\) (\d+)%", style)[1]) for style in styles])  # type: ignore[index]
            painted |= {token.evaluate("e => getComputedStyle(e).backgroundColor") for token in tokens}
            assert all("learner's" in (token.get_attribute("title") or "") for token in tokens)
        if SCREENSHOTS:
            page.screenshot(path=Path(SCREENSHOTS) / "mismatch.png", full_page=True)
        browser.close()
    assert len(painted) > 1
    return shares
