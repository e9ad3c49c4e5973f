"""Write deploy/grafana/dashboards/*.json from boards/, with Grafana's own types.

python deploy/grafana/make_dashboards.py
"""

from __future__ import annotations

import re
from pathlib import Path

from boards import BOARDS
from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as StatPanel
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeriesPanel
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableOption
from panel import Board, Panel

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


def of_run(expr: str) -> str:
    """Add the label of the run to every selector of our own metrics: `penstock_x` becomes `penstock_x{run=~"$run"}`."""

    def select(match: re.Match[str]) -> str:
        inside = f",{match[2]}" if match[2] else ""
        return f'{match[1]}{{run=~"$run"{inside}}}'

    return re.sub(r"(\b(?:penstock_\w+|up\b))(?:\{([^}]*)\})?", select, expr)


def build_panel(panel: Panel, panel_id: int) -> TimeSeriesPanel | StatPanel:
    if panel.is_number:
        built: TimeSeriesPanel | StatPanel = StatPanel().height(4).span(6)
    else:
        legend = common_builders.VizLegendOptions()
        legend.display_mode(common.LegendDisplayMode.LIST).placement(common.LegendPlacement.BOTTOM).show_legend(True)
        built = TimeSeriesPanel().height(8).span(8).fill_opacity(8).legend(legend)
    built.id(panel_id).title(panel.title).unit(panel.unit).datasource(SOURCE)
    if panel.about:
        built.description(panel.about)
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = Dataquery().expr(of_run(query.expr)).ref_id(letter).datasource(SOURCE)
        built.with_target(target.legend_format(query.legend or panel.title))
    return built


def build(board: Board) -> str:
    """Return the dashboard as JSON. The same board always gives the same text."""
    source = DatasourceVariable("datasource").label("Data source").type("prometheus")
    everything = VariableOption(selected=True, text="All", value="$__all")
    run = QueryVariable("run").label("Run").datasource(SOURCE).query("label_values(penstock_build_info, run)")
    run.include_all(True).all_value(".*").multi(True).current(everything)
    dashboard = Dashboard(board.title).uid(f"penstock-{board.name}").tags(["penstock"]).refresh("10s")
    dashboard.time("now-30m", "now").tooltip(DashboardCursorSync.CROSSHAIR).editable()
    dashboard.with_variable(source).with_variable(run)
    next_id = 1
    for section in board.sections:
        dashboard.with_row(Row(section.title).id(next_id))
        for panel in section.panels:
            next_id += 1
            dashboard.with_panel(build_panel(panel, next_id))
        next_id += 1
    return str(JSONEncoder(sort_keys=True, indent=1).encode(dashboard.build())) + "\n"


def main() -> None:
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(build(board))


if __name__ == "__main__":
    main()
