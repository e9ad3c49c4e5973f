"""`penstock submit`: a prompt is submitted once, whatever is repeated or lost."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from penstock.cli import main as cli
from penstock.cli.commands.submit import prompt_key, submit_all
from penstock.client import SyncPenstockClient
from penstock.errors import Unavailable
from penstock.trajectory import Prompt, Sampling


def test_a_bad_file_stops_before_anything_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("{}\n")
    assert cli.main(["submit", str(path), "--url", "http://127.0.0.1:1"]) == 2
    assert f"{path} line 1: prompt: must be" in capsys.readouterr().err


def prompts(count: int, temperature: float = 1.0) -> list[Prompt]:
    return [Prompt(messages=(("user", str(i)),), sampling=Sampling(temperature=temperature)) for i in range(count)]


class FakeGateway:
    """Responds to submissions as the gateway does. The first `failures` replies are lost after the prompts were
    accepted."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.accepted: dict[str, list[int]] = {}
        self.num_requests = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.num_requests += 1
        keys = body.get("prompt_keys")
        rows = [(key, 1) for key in keys] if keys else [(body["idempotency_key"], len(body["prompts"]))]
        num_replayed, ids = 0, []
        for key, count in rows:
            num_replayed += count if key in self.accepted else 0
            first = 1 + sum(map(len, self.accepted.values()))
            ids += self.accepted.setdefault(key, list(range(first, first + count)))
        if self.failures:
            self.failures -= 1
            raise httpx.ReadError("reset", request=request)
        replayed = num_replayed == len(ids)
        return httpx.Response(200, json={"prompt_ids": ids, "replayed": replayed, "num_replayed": num_replayed})


def test_rerunning_a_submission_is_harmless() -> None:
    gateway = FakeGateway()
    with SyncPenstockClient("http://gateway", transport=httpx.MockTransport(gateway)) as client:
        assert submit_all(client, prompts(600), epoch=0) == (0, list(range(1, 601)))
        assert submit_all(client, prompts(600), epoch=0) == (600, list(range(1, 601)))
        assert submit_all(client, prompts(600), epoch=1) == (0, list(range(601, 1201)))
    assert gateway.num_requests == 3 * 3


def test_a_part_of_a_file_and_the_whole_file_submit_nothing_twice() -> None:
    for counts in ((600, 5, 300), (5, 300, 600)):
        gateway = FakeGateway()
        with SyncPenstockClient("http://gateway", transport=httpx.MockTransport(gateway)) as client:
            for count in counts:
                submit_all(client, prompts(count), epoch=0)
        assert len(gateway.accepted) == 600


def test_a_lost_answer_is_retried_with_the_same_key() -> None:
    gateway = FakeGateway(failures=2)
    with SyncPenstockClient("http://gateway", transport=httpx.MockTransport(gateway)) as client:
        submission = client.submit(prompts(3))
    assert submission.prompt_ids == (1, 2, 3) and submission.replayed
    assert len(gateway.accepted) == 1


def test_retries_end_at_the_deadline_with_the_last_error() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with (
        SyncPenstockClient("http://gateway", deadline_s=0.3, transport=httpx.MockTransport(refuse)) as client,
        pytest.raises(Unavailable, match="no gateway answers at http://gateway"),
    ):
        client.get_run()


def test_the_key_of_a_prompt_depends_on_all_that_is_submitted() -> None:
    first, second = prompts(2)
    [warm] = prompts(1, 0.5)
    key = prompt_key(first, 0, 0)
    assert key == prompt_key(prompts(1)[0], 0, 0)
    assert (
        len({key, prompt_key(second, 0, 0), prompt_key(warm, 0, 0), prompt_key(first, 1, 0), prompt_key(first, 0, 1)})
        == 5
    )
