"""One run, started once for this file: its metrics, dashboards, logs and traces, and what an operator does with it.

The tests run in the order of the file: operations come after the tests of an untouched run, and the end comes last.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from penstock.api.records import Policy
from penstock.api_keys import read_own_key
from penstock.cli import main as cli
from penstock.client import SyncPenstockClient
from penstock.trajectory import Prompt, Sampling
from penstock_learner.checkpoints import shards_folder
from support.certificates import make_certificate
from support.gateways import LAUNCH, SCREENSHOTS, needs_chromium
from support.learner_runs import checkpoint_state
from support.monitoring import (
    Ask,
    Collector,
    collecting,
    dashboards,
    documented_metrics,
    expressions,
    filled_in,
    scraping,
    serve_engine_samples,
)
from support.processes import ROOT, DemoProcess, beyond_loopback, command_of, listeners, until

PROCESSES = {"gateway": "gateway", "rollout": "rollout-0", "learner": "learner"}
WITHOUT_SERIES = {"penstock_rollout_failures_total", "penstock_tool_calls_total", "penstock_reward_part_mean"}
"""Metrics whose labels have no values in this run, because the events that they count do not happen."""
ALERTS_WITHOUT_SERIES = {
    'penstock_gateway_requests_total{code=~"5..|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED"}': "no request has failed",
}
"""Selectors of alerts whose series exist only after a fault, with the reason."""
EXAMPLE_MODEL = ROOT / "examples" / "arithmetic" / "model"
SLOW_REWARD = """
import time

def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    time.sleep(0.4)
    return [compute_score(*sample) for sample in zip(data_sources, solution_strs, ground_truths, strict=True)]
"""
"""A step takes about a second, most of which no process computes in."""
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as server:
        yield server


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[DemoProcess]:
    """The cheapest real run, traced and with TLS: torch engine, one policy rank, no reference, and a reward that takes
    its time. It has written two checkpoints."""
    folder = tmp_path_factory.mktemp("live")
    reward = folder / "reward.py"
    reward.write_text(EXAMPLE_MODEL.with_name("reward.py").read_text() + SLOW_REWARD)
    certificate, key = make_certificate(folder, "run")
    overrides = {
        "tls.ca_file": str(certificate), "tls.cert_file": str(certificate), "tls.key_file": str(key),
        "rollout.engine.name": "torch", "learner.policy.num_ranks": "1", "learner.algorithm.kl.placement": "none",
        "replay.groups_per_step": "8", "learner.num_steps": "100000", "learner.checkpoint.every_steps": "2",
        "tracing.endpoint": collector.url, "weights.snapshot_every_steps": "1", "weights.keep_snapshots": "10000",
        "rollout.reward.function_file": str(reward), "rollout.reward.function_name": "compute_scores",
        "rollout.reward.function_batch": "true",
    }  # fmt: skip
    words = [word for name, value in overrides.items() for word in (f"--{name}", value)]
    started = DemoProcess(folder, *words, environment={"PENSTOCK_LOG": "json"})
    try:
        started.wait_for_step(5)
        yield started
    finally:
        started.end()


def endpoint(run: DemoProcess, process: str) -> str:
    fields = json.loads((run.folder / f"{PROCESSES[process]}.json").read_text())
    return f"{fields['host']}:{fields.get('metrics_port') or fields['rest_port']}"


def scrape(run: DemoProcess, process: str) -> str:
    with urllib.request.urlopen(f"http://{endpoint(run, process)}/metrics", timeout=60) as response:
        return str(response.read().decode())


def test_the_metrics_page_lists_exactly_what_the_run_exposes(live: DemoProcess) -> None:
    documented = set(documented_metrics())
    exposed, without_series = set(), set()
    for process in PROCESSES:
        for family in text_string_to_metric_families(scrape(live, process)):
            if family.name.startswith("penstock_") and not family.name.endswith("_created"):
                name = f"{family.name}_total" if family.type == "counter" else family.name
                exposed.add((name, family.type, process))
                if not family.samples:
                    without_series.add(name)
                assert family.documentation, name
    assert exposed == documented
    assert without_series <= WITHOUT_SERIES


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool; install prometheus")
@pytest.mark.parametrize("process", PROCESSES)
def test_promtool_finds_no_fault_with_the_metrics(live: DemoProcess, process: str) -> None:
    own = [line for line in scrape(live, process).splitlines() if re.match(r"(# \w+ )?penstock_", line)]
    assert len(own) > 20
    result = subprocess.run(
        ["promtool", "check", "metrics"], input="\n".join(own) + "\n", capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_no_process_of_a_private_run_listens_beyond_loopback(live: DemoProcess) -> None:
    """Ray, the ranks' rendezvous, Redis, the gateway and the rollout server included."""
    found = listeners([*live.descendants(), psutil.Process(live.process.pid)])
    for program in ("redis-server", "gcs_server", "raylet", "PolicyWorker", "penstock_rollout", "gateway"):
        assert any(program in command for command in found.values()), found
    assert beyond_loopback(found) == {}


def test_ray_starts_no_process_that_a_private_run_does_not_need(live: DemoProcess) -> None:
    commands = [" ".join(command_of(process)) for process in live.descendants()]
    assert any("gcs_server" in command for command in commands)
    for program in ("dashboard/dashboard.py", "_private/log_monitor.py", "autoscaler/"):
        assert not [command for command in commands if program in command and "raylet" not in command.split()[0]]


def test_no_command_line_shows_a_secret(live: DemoProcess) -> None:
    secrets = [
        (live.folder / "redis" / "password").read_text().strip(),
        *((live.folder / name).read_text().strip() for name in ("cluster.key", "gateway.key")),
    ]
    assert all(len(secret) >= 32 for secret in secrets)
    for process in [*live.descendants(), psutil.Process(live.process.pid)]:
        words = command_of(process)
        assert not [word for word in words for secret in secrets if secret in word], words
        assert not [word for word in words if "RAY_AUTH_TOKEN" in word], words


# ── Prometheus ──


@pytest.fixture(scope="module")
def prometheus(live: DemoProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """A real Prometheus that scrapes the run, and two servers with other engines."""
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus; install Debian's package of that name")
    with scraping(tmp_path_factory.mktemp("prometheus"), partial(endpoint, live), serve_engine_samples()) as ask:
        yield ask


def test_no_panel_is_empty(prometheus: Ask) -> None:
    """Expressions without a result are queried again: rates need two scrapes, and one metric needs several steps."""
    asked = expressions()
    assert len(asked) > 60
    empty = asked

    def all_are_answered() -> bool:
        nonlocal empty
        empty = [(panel, expression) for panel, expression in empty if not prometheus(expression)]
        return not empty

    with contextlib.suppress(AssertionError):
        until(all_are_answered, "panels with data")
    assert empty == []


def answers(prometheus: Ask, title: str) -> list[tuple[str, float]]:
    """Legend's last word and value of each series of a panel of the overview."""
    [panel] = [panel for panel in dashboards()["overview"]["panels"] if panel["title"] == title]
    found = []
    for target in panel["targets"]:
        label = re.findall(r"\w+", target["legendFormat"])[-1]
        expression = filled_in(target["expr"], window="5m")
        for sample in until(partial(prometheus, expression), f"an answer to {expression}"):
            found.append((sample["metric"].get(label, label), float(sample["value"][1])))
    return found


def test_the_first_row_gives_the_answers_of_the_api(live: DemoProcess, prometheus: Ask) -> None:
    with SyncPenstockClient.from_run_dir(live.folder) as client:
        assert client.get_run().state == "RUNNING"
    assert [name for name, _ in answers(prometheus, "Is it training?")] == ["running"]
    until(
        lambda: [name for name, seconds in answers(prometheus, "How fast?") if seconds > 0] == ["step", "last"],
        "a step since Prometheus runs",
    )
    stale = dict(answers(prometheus, "How stale?"))
    assert 0 <= stale["mean"] <= stale["bound"] + 1
    for title in ("What is the bottleneck?", "Is the reward rising?"):
        [(finding, level)] = answers(prometheus, title)
        assert finding and level in (1, 2, 3)
    assert answers(prometheus, "Firing alerts") == [("none", 0)]
    ends = dict(answers(prometheus, "What runs out next?"))
    assert {"Redis' memory", "disk of run_dir", f"memory of {endpoint(live, 'learner')}", "prompts"} <= ends.keys()
    assert list(ends.values()) == sorted(ends.values()) and all(0 <= left_s <= 7 * 86400 for left_s in ends.values())


def test_every_selector_of_an_alert_finds_series(prometheus: Ask) -> None:
    """An alert on series that do not exist would never fire."""
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    selectors = {
        found
        for group in rules
        for rule in group["rules"]
        for found in re.findall(r"\b(?:penstock_\w+|up\b)(?:\{[^}]*\})?", rule["expr"])
    }
    assert len(selectors) > 40
    for selector in selectors - set(ALERTS_WITHOUT_SERIES):
        until(partial(prometheus, selector), f"series of {selector}")
    assert not [selector for selector in ALERTS_WITHOUT_SERIES if prometheus(selector)]
    assert selectors >= set(ALERTS_WITHOUT_SERIES)


def marked(prometheus: Ask, name: str) -> list[dict[str, Any]]:
    """Events that the dashboards have marked in the last five minutes."""
    [mark] = [mark for mark in dashboards()["overview"]["annotations"]["list"] if mark["name"] == name]
    expression = mark["target"]["expr"].replace("$__interval", "1s").replace("$run", ".*")
    return prometheus(f"max_over_time(({expression})[5m:1s])")


def test_dashboards_mark_new_versions_and_nothing_else_in_a_quiet_run(prometheus: Ask) -> None:
    versions = until(lambda: marked(prometheus, "Policy versions"), "a new version")
    assert all(sample["metric"]["version"].isdigit() for sample in versions)
    for name in ("Restarts", "Rewinds", "Pauses", "Alerts"):
        assert marked(prometheus, name) == [], name


def test_the_shipped_configuration_scrapes_everything_and_keeps_the_engine_s_names(prometheus: Ask) -> None:

    def all_up() -> list[dict[str, Any]]:
        found = prometheus("up == 1")
        return found if len(found) == 5 else []

    assert {sample["metric"]["run"] for sample in until(all_up, "five targets")} == {"live"}
    assert len(until(partial(prometheus, '{__name__="vllm:num_requests_running"}'), "metrics of vLLM")) == 1
    running = until(partial(prometheus, '{__name__="sglang:num_running_reqs"}'), "metrics of SGLang")
    assert [sample["value"][1] for sample in running] == ["4"]


def test_a_healthy_run_fires_no_alert(prometheus: Ask) -> None:
    [state] = until(partial(prometheus, 'max(penstock_run_state{state="running"})'), "the state of the run")
    assert state["value"][1] == "1"
    assert prometheus('ALERTS{alertstate="firing"}') == []


# ── commands ──


def test_top_shows_the_numbers_of_the_metrics(live: DemoProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--once", "--run-dir", str(live.folder)]) == 0
    shown = capsys.readouterr().out
    step = int(re.search(r"step (\d+)", shown)[1])  # type: ignore[index]
    assert step >= 5 and "state running" in shown and "rollout-0" in shown
    assert re.search(r"reward [\d.]+  staleness [\d.]+  tokens/s [\d.]+", shown)
    assert re.search(r"learner .* [\d.]+ s ago .* 0 ", shown), "its heartbeat, and no restart"


@needs_chromium
def test_the_console_shows_what_top_shows(
    live: DemoProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from playwright.sync_api import sync_playwright

    def step_of_top() -> int:
        assert cli.main(["top", "--once", "--run-dir", str(live.folder)]) == 0
        return int(re.search(r"step (\d+)", capsys.readouterr().out)[1])  # type: ignore[index]

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**LAUNCH)
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.set_default_timeout(60_000)
        before = step_of_top()
        page.goto(f"http://{endpoint(live, 'gateway')}/#key={read_own_key(live.folder)}")
        shown = page.locator(".fact", has=page.get_by_text("step", exact=True)).locator("b").inner_text()
        page.get_by_role("cell", name="rollout-0").wait_for()
        picture = page.screenshot(path=Path(SCREENSHOTS or tmp_path) / "live-console.png")
        browser.close()
    assert before <= int(shown.replace(",", "")) <= step_of_top()
    assert picture.startswith(b"\x89PNG")


def test_the_doctor_finds_a_live_run_well(live: DemoProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", "--config", str(live.folder / "config.yaml")]) == 0
    findings = json.loads(capsys.readouterr().out)
    texts = {finding["check"]: finding["text"] for finding in findings if finding["level"] == "ok"}
    assert {"redis", "clock", "ports", "heartbeat", "conservation", "log-probs", "memory"} <= texts.keys()
    assert "engine and learner differ by" in texts["log-probs"]


# ── logs and traces ──


def log_lines(run: DemoProcess, part: str) -> list[dict[str, Any]]:
    lines = (run.folder / "logs" / f"{part}.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]  # one is being written


def test_log_lines_say_what_they_are_about(live: DemoProcess) -> None:
    steps = [line for line in log_lines(live, "learner") if line["message"].startswith("step ")]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert [line["policy_version"] for line in steps] == list(range(len(steps)))
    for part in ("learner", "gateway", "rollout-0"):
        assert {(line["run"], line["component"]) for line in log_lines(live, part)} >= {("t", part)}


def test_a_trace_shows_a_prompt_s_whole_life(live: DemoProcess, collector: Collector) -> None:
    """The trace runs from the submission to the version that contains the prompt, over three processes."""
    wanted = {
        "submit": "penstock-gateway", "lease": "penstock-rollout", "generate": "penstock-rollout",
        "reward": "penstock-rollout", "queue": "penstock-learner", "train": "penstock-learner",
        "publish": "penstock-learner",
    }  # fmt: skip

    def whole() -> list[dict[str, tuple[str, Span]]]:
        traces: dict[bytes, dict[str, tuple[str, Span]]] = {}
        for service, span in list(collector.spans):
            traces.setdefault(span.trace_id, {})[span.name] = (service, span)
        return [trace for trace in traces.values() if trace.keys() >= wanted.keys()]

    trace = until(whole, "a whole trace")[0]
    assert {name: service for name, (service, _) in trace.items()} == wanted
    parents = {name: span.parent_span_id for name, (_, span) in trace.items()}
    assert parents.pop("submit") == b""
    assert parents.pop("lease") == trace["submit"][1].span_id
    assert set(parents.values()) == {trace["lease"][1].span_id}
    attributes = {name: _attributes(span) for name, (_, span) in trace.items()}
    assert attributes["publish"]["policy_version"] > attributes["train"]["policy_version"]
    starts = [trace[name][1].start_time_unix_nano for name in ("submit", "lease", "generate", "reward", "train")]
    assert starts == sorted(starts)


def _attributes(span: Span) -> dict[str, int]:
    return {pair.key: pair.value.int_value for pair in span.attributes}


# ── operations ──


def test_a_version_is_rewound_to_and_released(live: DemoProcess, prometheus: Ask) -> None:
    """Servers and learner return to it; nothing newer is pushed until it is released. Dashboards mark it."""
    with SyncPenstockClient.from_run_dir(live.folder) as client:
        version = min(policy.policy_version for policy in client.policies().policies if policy.policy_version > 0)
        before = client.get_run().policy_version
        held = client.rewind_policy(version)
        assert held.is_held and held.snapshot_path

        def remade() -> Policy | None:
            """The version that the learner made of the old one's weights."""
            newer = [policy for policy in client.policies().policies if policy.policy_version > before]
            return next(
                (p for p in newer if (p.parent_version, p.weights_digest) == (version, held.weights_digest)), None
            )

        until(lambda: client.servers()[0].policy_version == version, f"the server to return to version {version}")
        returned = until(remade, f"the learner to return to version {version}")
        assert returned is not None
        until(lambda: client.get_run().policy_version > returned.policy_version + 1, "the learner to go on")
        assert client.servers()[0].policy_version == version, "nothing is pushed while the version is held"
        assert client.get_run().queue.expired > 0, "groups of the versions between are dropped"
        until(lambda: marked(prometheus, "Rewinds"), "the mark of the rewind")
        client.release_policy()
        until(lambda: client.servers()[0].policy_version > returned.policy_version, "the server to leave it")
        assert client.get_run().queue.conservation_error == 0


def test_a_pinned_server_answers_an_evaluation_with_its_version(live: DemoProcess) -> None:
    sums = [Prompt(messages=(("user", f"{n}+{n}="),), sampling=Sampling(max_tokens=8)) for n in range(10, 20)]
    with SyncPenstockClient.from_run_dir(live.folder) as client:
        version = client.servers()[0].policy_version
        # A server's record lags: it must say that the server has left the version before it can say that it is back.
        until(lambda: client.servers()[0].policy_version > version, "the server to leave it")
        for name in ("rollout-0", "pinned"):
            client.pin_policy(name, version)
        until(lambda: client.servers()[0].policy_version == version, f"the server to return to version {version}")
        client.create_evaluation("pinned", sums)
        result = client.wait_for_evaluation("pinned", timeout_s=120)
        assert (result.policy_version_min, result.policy_version_max) == (version, version)
        assert client.unpin_policy("rollout-0") and client.unpin_policy("pinned")
        until(lambda: client.servers()[0].policy_version > version, "the server to go on")


def test_a_forecast_from_the_run_s_files_is_near_what_it_measured(
    live: DemoProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The comparison allows a factor, because other tests run on the machine at the same time. A long test compares
    exactly. The measured staleness has no upper bound here: a test above held a version back while the learner went
    on, and staleness grew meanwhile."""
    (tmp_path / "metrics.txt").write_text(scrape(live, "rollout"))
    words = ["--run-dir", str(live.folder), "--rollout-metrics", str(tmp_path / "metrics.txt"), "--push-s", "0.1"]
    assert cli.main(["simulate", *words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    forecast, measured = result["forecast"], result["measured"]
    assert 1 / 5 < forecast["step_s"] / measured["step_s"] < 5
    assert 0 < forecast["staleness_mean"] <= 2 and measured["staleness_mean"] > 0


# ── the end ──


def test_an_interrupted_run_stops_everything(live: DemoProcess) -> None:
    live.descendants()
    live.process.send_signal(signal.SIGINT)
    assert live.wait() == 130
    assert "Traceback" not in live.text()
    assert live.orphans() == []
    assert list((live.folder / "checkpoints").glob("term-*-step-*")), "the learner took a checkpoint before it stopped"


def test_no_one_else_can_read_the_files_of_the_run(live: DemoProcess) -> None:
    paths = [live.folder, *live.folder.rglob("*")]
    names = {path.name for path in paths}
    assert {"config.yaml", "cluster.key", "metrics.jsonl", "learner.log", "redis"} <= names
    modes = {str(path): path.stat().st_mode & 0o777 for path in paths if not path.is_symlink()}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


def test_the_stopped_run_is_exported_with_the_weights_of_its_last_checkpoint(live: DemoProcess, tmp_path: Path) -> None:
    assert live.process.poll() is not None
    assert cli.main(["export", "--config", str(live.folder / "config.yaml"), "--out", str(tmp_path / "out")]) == 0
    newest = max((live.folder / "checkpoints").glob("term-*-step-*"))
    trained = {name.removeprefix("lm."): weight for name, weight in policy_weights(newest).items()}
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    untrained = dict(AutoModelForCausalLM.from_pretrained(EXAMPLE_MODEL).named_parameters())
    assert exported.keys() <= trained.keys()
    for name, weight in exported.items():
        torch.testing.assert_close(weight.detach(), trained[name].to(weight.dtype), rtol=0, atol=0)
    assert any(not torch.equal(exported[name], weight) for name, weight in untrained.items())


def test_the_console_of_the_ended_run_is_shown_again(live: DemoProcess) -> None:
    """Only Redis and the gateway are up, until Ctrl-C. Steps that a rewind has repeated are there once. The config is
    that of the run's folder, which names the Redis that has ended."""
    config, metrics = (live.folder / "config.yaml").read_text(), (live.folder / "metrics.jsonl").read_text()
    view = DemoProcess(live.folder.parent, "--view", words=("up", str(live.folder / "config.yaml")))
    try:
        until(lambda: "console and REST at" in view.text() or view.process.poll() is not None, "the console")
        with SyncPenstockClient.from_run_dir(live.folder) as client:
            steps = [step.step for step in client.metrics(1000)]
            assert client.get_run().state == "STOPPED" and steps == sorted(set(steps)) and len(steps) > 5
        commands = [" ".join(command_of(process)) for process in view.descendants()]
        started = [command for command in commands if "orphan_cleanup" not in command]
        assert sorted("redis-server" in command for command in started) == [False, True], commands
        assert any("penstock_services.gateway" in command for command in started), commands
        view.process.send_signal(signal.SIGINT)
        assert (view.wait(), view.orphans()) == (0, []), view.text()
    finally:
        view.end()
    assert (live.folder / "config.yaml").read_text() == config
    assert (live.folder / "metrics.jsonl").read_text() == metrics


def policy_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return dict(checkpoint_state(shards_folder(checkpoint, "policy"))["model"])
