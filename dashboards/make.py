"""Writes our dashboards as the JSON that Grafana reads: `make dashboards`."""

import argparse
from itertools import count
from pathlib import Path

import scaling
import sweep
import training
from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import ScaleDistribution, StackingMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh
from queries import EVENTS, Board, Panel, event, named

import data

BOARDS = (training.BOARD, scaling.BOARD, data.BOARD, sweep.BOARD)
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
GRID, HEIGHT, VALUE_HEIGHT = 24, 8, 4


def of(board: Board) -> str:
    """The JSON of a dashboard."""
    builder = (
        dashboard.Dashboard(board.title)
        .uid(f"tokendrop-{board.name}")
        .tags(["tokendrop"])
        .timezone("browser")
        .time("now-3h", "now")
        .refresh("30s")
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(choice("sweep", f"label_values({named(board.sweeps_of)}, sweep)"))
    )
    if board.runs_of is not None:
        of_sweep = f'{named(board.runs_of)}{{sweep=~"$sweep"}}'
        builder = builder.with_variable(choice("run", f"label_values({of_sweep}, run)"))
        for name, metric, colour in EVENTS:
            builder = builder.annotation(mark(name, event(metric), colour))
    numbers = count(1)
    for title, panels in board.rows:
        builder = builder.with_row(dashboard.Row(title).id(next(numbers)))
        for panel in panels:
            builder = builder.with_panel(drawn(panel, width(panels)).id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=1).encode(builder.build()) + "\n"


def width(panels: tuple[Panel, ...]) -> int:
    """Of the panels of a row: as many as fit share it."""
    return GRID // min(len(panels), 4 if panels[0].kind == "value" else 3)


def choice(name: str, query: str) -> dashboard.QueryVariable:
    """A variable of which some or all values can be chosen; a sweep may be empty."""
    return (
        dashboard.QueryVariable(name)
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def mark(name: str, query: str, colour: str) -> dashboard.AnnotationQuery:
    """Marks in all charts, where a query has a value."""
    return dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour).expr(query)


def drawn(panel: Panel, wide: int) -> stat.Panel | timeseries.Panel:
    """A panel as Grafana draws it."""
    if panel.kind == "value":
        chart = stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"])).height(VALUE_HEIGHT)
    else:
        chart = timeseries.Panel().height(HEIGHT).legend(common.VizLegendOptions().show_legend(True))
        if panel.kind == "stacked":
            chart = chart.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40)
        if panel.log:
            chart = chart.scale_distribution(common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10))
    chart = chart.title(panel.title).description(panel.about).unit(panel.unit).span(wide).datasource(SOURCE)
    for letter, (legend, query) in zip("ABCDE", panel.queries, strict=False):
        chart = chart.with_target(prometheus.Dataquery().expr(query).legend_format(legend).ref_id(letter).range())
    return chart


def main() -> None:
    """Write all of them beside this file, or elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, help="folder to write to")
    folder = parser.parse_args().to
    for board in BOARDS:
        (folder / f"{board.name}.json").write_text(of(board), encoding="utf-8")


if __name__ == "__main__":
    main()
