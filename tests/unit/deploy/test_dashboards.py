"""Dashboards are what the generator writes, follow Grafana's rules, and query only metrics that exist."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import reduce
from itertools import combinations, zip_longest
from operator import getitem
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from urllib.parse import parse_qs, urlsplit

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from penstock_learner.metrics import LearnerMetrics
from penstock_rollout.metrics import RolloutMetrics
from support.monitoring import (
    DEPLOY,
    ROOT,
    declared_names,
    filled_in,
    gateway_metrics,
    names_in,
    run_wide_names,
    scraping,
    serve_engine_samples,
)
from support.processes import until

DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
ENGINE_SAMPLES = ROOT / "tests" / "prometheus"
UNITS = {"none", "short", "s", "bytes", "Bps", "percentunit", "reqps"}
"""Units of Grafana that are used. Others are a suffix of our own."""
COLORS = {"green", "blue", "orange", "red", "purple", "yellow", "light-blue"}
FIRST_ROW = [
    "Is it training?", "How fast?", "How stale?", "What is the bottleneck?", "Is the reward rising?",
]  # fmt: skip
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool; install prometheus")
RUNBOOK_ANCHOR = re.compile(r'<h2 id="(\w+)">(\w+)</h2>')


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboards" / f"{name}.json").read_text())
    return found


def panels(dashboard: Path) -> list[dict[str, Any]]:
    return [panel for panel in load(dashboard.stem)["panels"] if panel["type"] != "row"]


def expressions(dashboard: Path) -> list[str]:
    queried = [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]
    return queried + [mark["target"]["expr"] for mark in load(dashboard.stem)["annotations"]["list"]]


def test_dashboards_are_those_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEPLOY / "grafana"))
    made = runpy.run_path(str(DEPLOY / "grafana" / "make_dashboards.py"))
    built = {f"{board.name}.json": made["build"](board) for board in made["BOARDS"]}
    written = {path.name: path.read_text() for path in DASHBOARDS}
    assert written == built, "run: python deploy/grafana/make_dashboards.py"
    assert len(built) == 4


MARK_OF_PROMETHEUS = {"target", "titleFormat", "textFormat", "useValueForTime"}
"""Fields of an annotation that Grafana's types leave to its data source."""


def encoded(decoded: Any) -> Any:
    return json.loads(JSONEncoder().encode(decoded))


def unknown_fields(given: Any, known: Any, path: str = "") -> Iterator[str]:
    """Paths in `given` that are not in `known`, or have another value there."""
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            yield from unknown_fields(value, known.get(name, Ellipsis), f"{path}/{name}")
    elif isinstance(given, list) and isinstance(known, list):
        for number, (value, other) in enumerate(zip_longest(given, known, fillvalue=Ellipsis)):
            yield from unknown_fields(value, other, f"{path}/{number}")
    elif given != known:
        yield path


def misfits(value: Any, hint: Any, path: str = "") -> Iterator[str]:
    """Paths of a decoded board at which a value does not have the type that Grafana has for it."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Union:
        found = [list(misfits(value, each, path)) for each in inner if each is not type(None) or value is None]
        if all(found):
            yield from max(found, key=lambda paths: max(map(len, paths)))
    elif isinstance(value, list) and kind is list:
        for number, each in enumerate(value):
            yield from misfits(each, inner[0], f"{path}/{number}")
    elif isinstance(value, dict) and kind is dict:
        for name, each in value.items():
            yield from misfits(each, inner[1], f"{path}/{name}")
    elif isinstance(value, dict) and hasattr(hint, "from_json"):  # the decoder leaves links as they are
        decoded = hint.from_json(value)
        yield from unknown_fields(value, encoded(decoded), path)
        yield from misfits(decoded, hint, path)
    elif hasattr(value, "to_json") and isinstance(value, kind or hint):
        for name, each in get_type_hints(type(value)).items():
            yield from misfits(getattr(value, name), each, f"{path}/{name}")
    elif kind is Literal or issubclass(kind or hint, Enum):
        if value not in (inner or [each.value for each in hint]):
            yield path
    elif not isinstance(value, int | float if hint is float else kind or hint) or (hint is int and value is True):
        yield path


def refused_by_grafana(board: dict[str, Any]) -> list[str]:
    given = copy.deepcopy(board)
    for mark in given["annotations"]["list"]:
        assert mark.keys() >= MARK_OF_PROMETHEUS
        for name in MARK_OF_PROMETHEUS:
            del mark[name]
    decoded = GrafanaDashboard.from_json(copy.deepcopy(given))
    return [*unknown_fields(given, encoded(decoded)), *misfits(decoded, GrafanaDashboard)]


def test_grafanas_own_types_know_every_field_of_the_dashboards() -> None:
    register_default_plugins()
    for path in DASHBOARDS:
        assert refused_by_grafana(load(path.stem)) == []


@pytest.mark.parametrize(
    ("where", "value", "path"),
    [
        (("graphToolTip",), 1, "/graphToolTip"),
        (("graphTooltip",), 7, "/graph_tooltip"),
        (("panels", 1, "gridPos", "w"), "8", "/panels/1/grid_pos/w"),
        (("panels", 1, "links", 0, "targetBlanc"), True, "/panels/1/links/0/targetBlanc"),
        (("panels", 1, "targets", 0, "legend"), "a", "/panels/1/targets/0/legend"),
        (("panels", 1, "options", "legend", "placement"), "below", "/panels/1/options/legend/placement"),
        (("panels", 1, "fieldConfig", "defaults", "custom", "fill"), 8, "/panels/1/fieldConfig/defaults/custom/fill"),
        (("templating", "list", 1, "multiple"), True, "/templating/list/1/multiple"),
    ],
)
def test_what_grafanas_types_do_not_know_is_found(where: tuple[Any, ...], value: Any, path: str) -> None:
    register_default_plugins()
    board = load("learner")
    *parents, last = where
    reduce(getitem, parents, board)[last] = value
    assert refused_by_grafana(board) == [path]


def test_dashboards_ask_only_for_metrics_that_the_code_declares() -> None:
    known = declared_names()
    for dashboard in DASHBOARDS:
        asked = set().union(*map(names_in, expressions(dashboard)))
        assert asked and asked <= known, sorted(asked - known)


def test_every_metric_is_on_a_dashboard() -> None:
    asked = {name for dashboard in DASHBOARDS for text in expressions(dashboard) for name in names_in(text)}
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in declared_names()} == shown


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engine_panels_ask_only_for_metrics_that_the_engine_has(engine: str) -> None:
    """The samples are what vLLM 0.32 and SGLang 0.5.23 expose."""
    text = (ENGINE_SAMPLES / f"{engine}.prom").read_text()
    exposed = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    asked = {name for path in DASHBOARDS for expr in expressions(path) for name in re.findall(rf"{engine}:\w+", expr)}
    assert len(asked) >= 6 and asked <= exposed, sorted(asked - exposed)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_vllm_declares_the_metrics_that_panels_ask_for() -> None:
    found = importlib.util.find_spec("vllm")
    assert found and found.origin
    source = (Path(found.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    asked = {name for path in DASHBOARDS for expr in expressions(path) for name in re.findall(r"vllm:\w+", expr)}
    declared = {re.sub("_(total|bucket|sum|count)$", "", name) for name in asked}
    assert declared and [name for name in declared if f'"{name}"' not in source] == []


def test_no_panel_sums_what_every_replica_of_the_gateway_reports() -> None:
    """Two replicas would show everything twice."""
    summed = re.compile(r"\b(?:sum|count)(?: by \([^)]*\))? ?\((?:(?:rate|increase)\()?(penstock_\w+)")
    for path in DASHBOARDS:
        for expression in expressions(path):
            assert not set(summed.findall(expression)) & run_wide_names(), expression


def test_panels_have_ids_a_data_source_variable_a_unit_and_a_description() -> None:
    for path in DASHBOARDS:
        dashboard = load(path.stem)
        assert "__inputs" not in dashboard
        assert [v["type"] for v in dashboard["templating"]["list"]] == ["datasource", "query", "interval"]
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids)
        titles = [panel["title"] for panel in panels(path)]
        assert len(set(titles)) == len(titles), "links name panels by their title"
        for panel in panels(path):
            assert panel["datasource"]["uid"] == "${datasource}" and panel["description"]
            ref_ids = [target["refId"] for target in panel["targets"]]
            assert ref_ids and len(set(ref_ids)) == len(ref_ids)
            unit = panel["fieldConfig"]["defaults"]["unit"]
            assert unit in UNITS or unit.startswith("suffix:"), panel["title"]


def test_thresholds_rise_and_have_known_colors() -> None:
    num_with_thresholds = 0
    for path in DASHBOARDS:
        for panel in panels(path):
            first, *steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
            values = [step["value"] for step in steps]
            assert first["value"] is None and values == sorted(set(values)), panel["title"]
            assert {step["color"] for step in (first, *steps)} <= COLORS
            num_with_thresholds += bool(steps)
    assert num_with_thresholds > 25


def test_panels_stand_side_by_side_on_the_grid() -> None:
    for path in DASHBOARDS:
        cells = [panel["gridPos"] for panel in load(path.stem)["panels"]]
        assert all(cell["x"] + cell["w"] <= 24 for cell in cells)
        for one, other in combinations(cells, 2):
            apart = (
                one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
                or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
            )  # fmt: skip
            assert apart, (path.stem, one, other)


def test_links_lead_to_panels_and_runbooks_that_exist() -> None:
    page = (ROOT / "services" / "penstock_services" / "gateway" / "console" / "runbooks.html").read_text()
    anchors = dict(RUNBOOK_ANCHOR.findall(page))
    num_to_panels = num_to_runbooks = 0
    for path in DASHBOARDS:
        for panel in panels(path):
            for link in panel.get("links", []):
                url = urlsplit(link["url"])
                if url.path == "/console/runbooks.html":
                    num_to_runbooks += 1
                    assert link["title"] == f"Runbook: {anchors[url.fragment]}"
                    continue
                num_to_panels += 1
                board = load(url.path.removeprefix("/d/penstock-"))
                titles = {str(other["id"]): other["title"] for other in board["panels"]}
                [target] = parse_qs(url.query)["viewPanel"]
                assert link["title"].startswith(f"{titles[target]} (")
                assert "${__url_time_range}" in url.query and "${run:queryparam}" in url.query
    assert num_to_panels > 40 and num_to_runbooks > 40


def test_the_first_row_answers_the_five_questions() -> None:
    row = sorted((panel["gridPos"]["y"], panel["gridPos"]["x"], panel["title"]) for panel in load("overview")["panels"])
    assert [title for y, _, title in row if y == 1] == FIRST_ROW


def test_every_dashboard_marks_versions_restarts_and_rewinds() -> None:
    for path in DASHBOARDS:
        marks = {mark["name"]: mark for mark in load(path.stem)["annotations"]["list"]}
        assert {"Policy versions", "Restarts", "Rewinds", "Pauses", "Alerts"} <= marks.keys()
        for mark in marks.values():
            assert mark["enable"] and mark["target"]["datasource"]["uid"] == "${datasource}"
            assert mark["iconColor"] in COLORS


def test_every_question_of_an_on_call_engineer_has_its_panels() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    rows = re.findall(r"^\| (.+\?) \| (\*.+\*.*) \|$", page, re.M)
    assert len(rows) >= 10
    for question, cell in rows:
        named = re.findall(r"\*([^*]+)\*, (\w+)", cell)
        assert named, question
        for title, board in named:
            assert title in [panel["title"] for panel in load(board)["panels"]], (question, title)


@needs_promtool
def test_what_runs_out_next_is_a_leak_and_not_a_model_that_was_loaded(tmp_path: Path) -> None:
    """At 60 minutes, a leak of 10 bytes a minute has 600 bytes left: an hour. The others have no end in sight."""
    [panel] = [panel for panel in load("overview")["panels"] if panel["title"] == "What runs out next?"]
    available = 'penstock_host_memory_available_bytes{{run="a",instance="{}"}}'
    series = {"leaks": "1200-10x60", "loaded": "1000x3 200x57", "young": "_x49 1000-90x11"}
    week = 7 * 86400
    expected = [("memory of leaks", 3600), ("memory of loaded", week), ("memory of young", week)]
    values = {available.format(name): values for name, values in series.items()}
    labels = {f'{{run="a",what="{what}"}}': value for what, value in expected}
    _check_promql(tmp_path, f"round({_filled(panel)})", values, labels)


@needs_promtool
@pytest.mark.parametrize(
    ("board", "seconds", "share"),
    [
        ("learner", {"penstock_learner_compute_seconds_total": 45}, 0.75),
        ("rollout", {"penstock_rollout_generating_seconds_total": 48, "penstock_rollout_paused_seconds_total": 0}, 0.8),
        (
            "rollout",
            {"penstock_rollout_generating_seconds_total": 48, "penstock_rollout_paused_seconds_total": 9},
            0.65,
        ),
        ("rollout", {"penstock_rollout_generating_seconds_total": 6, "penstock_rollout_paused_seconds_total": 12}, 0),
    ],
)
def test_a_busy_gpu_computes(board: str, seconds: dict[str, int], share: float, tmp_path: Path) -> None:
    """`seconds` are of each minute."""
    [panel] = [panel for panel in load(board)["panels"] if panel["title"] == "GPU busy"]
    series = {f'{name}{{run="a",instance="i"}}': f"0+{number}x60" for name, number in seconds.items()}
    series['penstock_rollout_info{run="a",instance="i",server="s"}'] = "1x60"
    labels = '{run="a"}' if board == "learner" else '{run="a",instance="i",server="s"}'
    _check_promql(tmp_path, f"round({_filled(panel)}, 0.001)", series, {labels: float(share)})


def _filled(panel: dict[str, Any]) -> str:
    expr: str = panel["targets"][0]["expr"]
    return expr.replace("$run", ".*").replace("$window", "5m")


def _check_promql(folder: Path, expr: str, series: dict[str, str], expected: Mapping[str, float]) -> None:
    """Check what an expression gives after an hour."""
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": expr, "eval_time": "60m", "exp_samples": samples}],
    }
    (folder / "case.yml").write_text(json.dumps({"evaluation_interval": "1m", "tests": [case]}))
    command = ["promtool", "test", "rules", str(folder / "case.yml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus; install Debian's package of that name")
def test_two_runs_are_two_lines_of_every_panel(tmp_path: Path) -> None:
    """A real Prometheus scrapes the same processes as those of two runs."""
    registries = {
        "gateway": gateway_metrics().registry,
        "learner": LearnerMetrics(CollectorRegistry(), "standalone").registry,
        "rollout": RolloutMetrics(CollectorRegistry()).registry,
    }
    ports = {name: start_http_server(0, "127.0.0.1", registry)[0].server_port for name, registry in registries.items()}
    with scraping(tmp_path, lambda name: f"127.0.0.1:{ports[name]}", serve_engine_samples(), ("a", "b")) as ask:
        num_targets = 2 * (len(registries) + 2)
        until(lambda: len(ask("sum_over_time(up[20s]) > 2")) == num_targets, "scrapes of all targets", timeout_s=120)
        shown = [
            (panel["title"], target) for path in DASHBOARDS for panel in panels(path) for target in panel["targets"]
        ]
        assert [title for title, target in shown if "{{run}}" not in target["legendFormat"]] == []
        deadline = time.monotonic() + 60
        while True:  # a scrape that a busy machine delays for more than its second leaves a gap in the lines
            found = [(title, target["expr"], _runs_of(ask(filled_in(target["expr"])))) for title, target in shown]
            no_lines = {True: ([], [None]), False: ([],)}
            wrong = [
                (title, runs)
                for title, expr, runs in found
                if runs not in no_lines["vector(0)" in expr] and {*runs} != {"a", "b"}
            ]
            num_answered = sum(len(runs) > 1 for _, _, runs in found)
            if (not wrong and num_answered > 120) or time.monotonic() > deadline:
                break
    assert wrong == [] and num_answered > 120


def _runs_of(samples: list[dict[str, Any]]) -> list[str | None]:
    return [sample["metric"].get("run") for sample in samples]
