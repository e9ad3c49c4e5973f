"""The OpenAPI document has answers and the security scheme, and a page shows it without other hosts."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest

from penstock.replay.queue import RedisReplayQueue
from support.gateways import LAUNCH, PROMPT, RUN, Gateway, needs_chromium, publish, submit

FILES = {"": "html", "/page.js": "javascript", "/swagger-ui.css": "css", "/swagger-ui-bundle.js": "javascript"}


@pytest.fixture
async def document(gateway: Gateway) -> dict[str, Any]:
    found: dict[str, Any] = (await gateway.rest.get("/v1/openapi.json")).json()
    return found


async def test_every_operation_says_what_it_answers(document: dict[str, Any]) -> None:
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert len(operations) > 40
    for operation in operations:
        (media,) = operation["responses"]["200"]["content"].values()
        assert media["schema"], operation["operationId"]
        problem = operation["responses"]["default"]["content"]["application/problem+json"]["schema"]
        assert problem == {"$ref": "#/components/schemas/Problem"}


async def test_every_reference_leads_to_a_schema(document: dict[str, Any]) -> None:
    names = set(re.findall(r"'#/components/schemas/([^']+)'", str(document)))
    assert {"Run", "Policy", "Result", "Group", "Completion", "Problem", "SubmitPrompts"} <= names
    assert names <= document["components"]["schemas"].keys()


async def test_the_key_is_needed_where_the_document_says_so(gateway: Gateway, document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["security"] == [{"key": []}]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            url = re.sub(r"\{\w+\}", "1", path)
            answer = await gateway.rest.request(method, url, headers={"Authorization": ""})
            assert (answer.status_code == 401) == ("security" not in operation), f"{method} {path}: {answer.text}"


async def test_a_page_without_swagger_ui_says_what_to_install(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    answer = await gateway.rest.get("/docs")
    assert answer.status_code == 404 and "needs the package fastapi-offline" in answer.json()["detail"]


async def test_answers_are_as_documented(gateway: Gateway, queue: RedisReplayQueue, document: dict[str, Any]) -> None:
    (prompt_id,) = await submit(gateway, PROMPT)
    await publish(queue, 0, 1)
    paths = (
        "", "/policies", "/policies/1", "/policies:compare?policy_version=0&other_version=1", "/prompts",
        f"/prompts/{prompt_id}", "/groups", "/metrics", "/servers", "/dead-letters",
    )  # fmt: skip
    for path in paths:
        answer = (await gateway.rest.get(f"{RUN}{path}")).raise_for_status().json()
        pattern = f"/v1/runs/{{run}}{path.partition('?')[0]}".replace("/policies/1", "/policies/{policy_version}")
        operation = document["paths"][re.sub(rf"/prompts/{prompt_id}$", "/prompts/{prompt_id}", pattern)]["get"]
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(answer, {**schema, "components": document["components"]})


async def test_the_page_needs_no_key_and_no_other_host(gateway: Gateway) -> None:
    for path, kind in FILES.items():
        answer = await gateway.rest.get(f"/docs{path}", headers={"Authorization": ""})
        assert answer.status_code == 200 and kind in answer.headers["content-type"], answer.text
        assert "script-src 'self';" in answer.headers["content-security-policy"]
    assert "//" not in (await gateway.rest.get("/docs")).text
    assert (await gateway.rest.get("/docs/routes.py")).status_code == 404


@needs_chromium
async def test_the_page_shows_the_operations_to_who_has_the_key(gateway: Gateway) -> None:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(**LAUNCH)
        page = await browser.new_page()
        page.set_default_timeout(60_000)
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        await page.goto(f"{gateway.url}/docs#key={gateway.key}")
        await page.locator(".opblock-summary-path", has_text="policies:compare").first.wait_for(state="attached")
        assert problems == []
        other = await (await browser.new_context()).new_page()
        other.set_default_timeout(60_000)
        await other.goto(f"{gateway.url}/docs")
        await other.get_by_label("API key").fill(gateway.key)
        await other.get_by_role("button", name="Show the API").click()
        await other.locator(".opblock-tag").first.wait_for()
        await browser.close()
