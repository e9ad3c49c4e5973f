"""Write deploy/grafana/dashboards/*.json from boards/, with Grafana's own types.

python deploy/grafana/make_dashboards.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from boards import BOARDS
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders.bargauge import Panel as BarsPanel
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    IntervalVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as StatPanel
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeriesPanel
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DynamicConfigValue,
    GridPos,
    Threshold,
    ThresholdsMode,
    VariableOption,
)
from marks import MARKS
from panel import Board, Mark, Panel

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
RUNBOOKS = "http://127.0.0.1:8080/console/runbooks.html"
"""Page of the gateway that compose starts. The chart replaces it with `monitoring.runbookUrl`."""
COLUMNS = 24
WINDOWS = ("1m", "5m", "15m", "1h")
_SELECTOR = re.compile(r"(\b(?:penstock_\w+|(?:vllm|sglang):\w+|up\b|ALERTS\b))(?:\{([^}]*)\})?")
_AGGREGATION = re.compile(r"\b(sum|avg|min|max|count)(?: by \(([^)]*)\))? ?(?=\()")

AnyPanel = TimeSeriesPanel | StatPanel | BarsPanel


def of_run(expr: str) -> str:
    """Add the label of the run to every selector and aggregation, so that two runs are two lines: `max(penstock_x)`
    becomes `max by (run) (penstock_x{run=~"$run"})`."""

    def select(match: re.Match[str]) -> str:
        inside = f",{match[2]}" if match[2] else ""
        return f'{match[1]}{{run=~"$run"{inside}}}'

    def group(match: re.Match[str]) -> str:
        labels = [label for label in (match[2] or "").split(", ") if label]
        return f"{match[1]} by ({', '.join(labels if 'run' in labels else ['run', *labels])}) "

    return _AGGREGATION.sub(group, _SELECTOR.sub(select, expr))


def of_run_legend(legend: str) -> str:
    return legend if "{{run}}" in legend else f"{{{{run}}}} {legend}".strip()


def panel_ids(board: Board) -> dict[str, int]:
    """The id of each panel by its title. Rows have ids too."""
    places = (place for section in board.sections for place in ("", *(panel.title for panel in section.panels)))
    return {title: number for number, title in enumerate(places, start=1) if title}


def links(panel: Panel) -> Iterator[DashboardLink]:
    """To the panels with more detail, with the same time and variables, and to the runbooks of the panel's alerts."""
    for target in panel.opens:
        name, _, title = target.partition("/")
        board = next(board for board in BOARDS if board.name == name)
        kept = "${__url_time_range}&${datasource:queryparam}&${run:queryparam}"
        url = f"/d/penstock-{name}?viewPanel={panel_ids(board)[title]}&{kept}"
        yield DashboardLink(f"{title} ({name})").type(DashboardLinkType.LINK).url(url)
    for alert in panel.alerts:
        link = DashboardLink(f"Runbook: {alert}").type(DashboardLinkType.LINK).url(f"{RUNBOOKS}#{alert.lower()}")
        yield link.target_blank(True)


def thresholds(panel: Panel) -> ThresholdsConfig:
    steps = [Threshold(value=None, color="green"), *(Threshold(value, color) for value, color in panel.limits.items())]
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def drawn(panel: Panel) -> AnyPanel:
    """A panel of the right kind, with the options of that kind."""
    if panel.look == "lines":
        legend = common_builders.VizLegendOptions()
        legend.display_mode(common.LegendDisplayMode.LIST).placement(common.LegendPlacement.BOTTOM).show_legend(True)
        style = common_builders.GraphThresholdsStyleConfig()
        style.mode(common.GraphTresholdsStyleMode.DASHED if panel.limits else common.GraphTresholdsStyleMode.OFF)
        # Values of steps arrive rarely, and a gap up to an hour between them is not a gap in the data.
        return TimeSeriesPanel().fill_opacity(8).legend(legend).thresholds_style(style).span_nulls(3_600_000)
    newest = common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    if panel.look == "bars":
        bars = BarsPanel().reduce_options(newest).orientation(common.VizOrientation.HORIZONTAL)
        return bars.display_mode(common.BarGaugeDisplayMode.BASIC)
    shown = StatPanel().reduce_options(newest)
    if panel.look == "name":
        shown.text_mode(common.BigValueTextMode.NAME).graph_mode(common.BigValueGraphMode.NONE)
        return shown.color_mode(common.BigValueColorMode.BACKGROUND)
    return shown.color_mode(common.BigValueColorMode.VALUE).graph_mode(common.BigValueGraphMode.AREA)


def build_panel(panel: Panel, panel_id: int, x: int, y: int) -> AnyPanel:
    built = drawn(panel)
    built.id(panel_id).title(panel.title).description(panel.about).unit(panel.unit).datasource(SOURCE)
    built.grid_pos(GridPos(h=panel.height, w=panel.width, x=x, y=y)).thresholds(thresholds(panel))
    for word, color in panel.colors.items():
        fixed = DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})
        built.override_by_regexp(f"/(^| ){re.escape(word)}$/", [fixed])
    if found := list(links(panel)):
        built.links(found)
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = Dataquery().expr(of_run(query.expr)).ref_id(letter).datasource(SOURCE)
        if panel.look in ("name", "bars"):
            target.instant()
        built.with_target(target.legend_format(of_run_legend(query.legend)))
    return built


def annotation(mark: Mark) -> dict[str, Any]:
    """Grafana's annotation query. The SDK's type lacks the fields of the Prometheus data source."""
    source = {"type": SOURCE.type_val, "uid": SOURCE.uid}
    return {
        "name": mark.name,
        "datasource": source,
        "enable": True,
        "hide": False,
        "iconColor": mark.color,
        "target": {"expr": of_run(mark.expr), "interval": "1m", "refId": "Anno", "datasource": source},
        "titleFormat": mark.name,
        "textFormat": mark.text,
        "useValueForTime": False,
    }


def empty_dashboard(board: Board) -> Dashboard:
    source = DatasourceVariable("datasource").label("Data source").type("prometheus")
    everything = VariableOption(selected=True, text="All", value="$__all")
    run = QueryVariable("run").label("Run").datasource(SOURCE).query("label_values(penstock_build_info, run)")
    run.include_all(True).all_value(".*").multi(True).current(everything)
    options = [VariableOption(selected=each == "5m", text=each, value=each) for each in WINDOWS]
    window = IntervalVariable("window").label("Averaged over").values(",".join(WINDOWS)).options(options)
    window.current(VariableOption(selected=True, text="5m", value="5m")).auto(False)
    dashboard = Dashboard(board.title).uid(f"penstock-{board.name}").tags(["penstock"]).refresh("10s")
    dashboard.time("now-30m", "now").tooltip(DashboardCursorSync.CROSSHAIR).editable()
    others = DashboardLink("Penstock").type(DashboardLinkType.DASHBOARDS).tags(["penstock"]).as_dropdown(False)
    runbooks = DashboardLink("Runbooks").type(DashboardLinkType.LINK).url(RUNBOOKS).icon("doc").target_blank(True)
    dashboard.link(others.keep_time(True).include_vars(True)).link(runbooks)
    return dashboard.with_variable(source).with_variable(run).with_variable(window)


def build(board: Board) -> str:
    """Return the dashboard as JSON. The same board always gives the same text."""
    dashboard, y, next_id = empty_dashboard(board), 0, 1
    for section in board.sections:
        dashboard.with_row(Row(section.title).id(next_id).grid_pos(GridPos(h=1, w=COLUMNS, x=0, y=y)))
        x, y, line_height = 0, y + 1, 0
        for panel in section.panels:
            next_id += 1
            if x + panel.width > COLUMNS:
                x, y, line_height = 0, y + line_height, 0
            dashboard.with_panel(build_panel(panel, next_id, x, y))
            x, line_height = x + panel.width, max(line_height, panel.height)
        y, next_id = y + line_height, next_id + 1
    made = json.loads(JSONEncoder(sort_keys=True).encode(dashboard.build()))
    made["annotations"] = {"list": [annotation(mark) for mark in MARKS]}
    return json.dumps(made, sort_keys=True, indent=1) + "\n"


def main() -> None:
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(build(board))


if __name__ == "__main__":
    main()
