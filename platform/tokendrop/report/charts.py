"""The charts, as Vega-Lite; each names the data that it is drawn from, and is filtered by the arms that are shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from tokendrop.report.curves import Rows

Spec = dict[str, Any]
AnyChart = alt.Chart | alt.LayerChart | alt.FacetChart  # by its types, layers may become the last one
_AXES = {
    "step": ("step", "steps"),
    "layer_tokens": ("layer tokens", "layer tokens"),
    "flops": ("FLOPs, by the plan's count", "FLOPs"),
    "seconds": ("training time, s", "training time"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart of the page, and the table below it."""

    name: str
    title: str
    about: str
    """What it shows, for those who see it and those who hear it."""
    data: str
    """Of `curves.datasets`."""
    x: str
    y: str
    draw: Callable[["Figure"], AnyChart]
    y_title: str = ""


def _base(figure: Figure) -> alt.Chart:
    return alt.Chart(alt.NamedData(name=figure.data)).transform_filter("indexof(shown, datum.arm) >= 0")


def _x(figure: Figure) -> alt.X:
    title = _AXES[figure.x][0]
    return alt.X(f"{figure.x}:Q", title=title, axis=alt.Axis(format="~s", grid=False), scale=alt.Scale(nice=False))


def _y(figure: Figure, *, zero: bool = False, format: str = "~s", whole: bool = False) -> alt.Y:
    axis = alt.Axis(format=format, labelExpr="datum.value % 1 ? '' : datum.label") if whole else alt.Axis(format=format)
    return alt.Y(f"{figure.y}:Q", title=figure.y_title, scale=alt.Scale(zero=zero), axis=axis)


def _tips(figure: Figure, *others: str) -> list[alt.Tooltip]:
    numbers = [alt.Tooltip(f"{name}:Q", format=",.5~g") for name in (figure.x, figure.y, *others)]
    return [alt.Tooltip("arm:N"), *numbers]


def _curve(figure: Figure) -> AnyChart:
    """A line an arm, and a band where seeds or steps spread."""
    base = _base(figure).encode(x=_x(figure), color=alt.Color("arm:N"))
    band = base.mark_area(opacity=0.18, aria=False).encode(y=alt.Y("low:Q"), y2="high:Q")
    points = figure.data == "validation"
    line = base.mark_line(
        point=alt.OverlayMarkDef(size=22, filled=True) if points else False, strokeWidth=1.8, clip=True
    )
    return alt.layer(band, line.encode(y=_y(figure), tooltip=_tips(figure, "low", "high")))


def _stepped(figure: Figure) -> AnyChart:
    """A line an arm, with upright rules where workers changed or began again."""
    line = (
        _base(figure)
        .mark_line(interpolate="linear" if figure.y == "lr" else "step-after", strokeWidth=1.8)
        .encode(
            x=_x(figure),
            y=_y(figure, zero=True, format=".1e" if figure.y == "lr" else "d", whole=figure.y == "world_size"),
            color=alt.Color("arm:N"),
            tooltip=_tips(figure),
        )
    )
    rules = (
        alt.Chart(alt.NamedData(name="marks"))
        .transform_filter("indexof(shown, datum.arm) >= 0")
        .mark_rule(strokeWidth=1.5, opacity=0.8)
        .encode(
            x="step:Q",
            color=alt.Color("arm:N"),
            strokeDash=alt.StrokeDash(
                "kind:N", scale=alt.Scale(domain=[*_DASHES], range=[*_DASHES.values()]), legend=None
            ),
            tooltip=[alt.Tooltip(f"{name}:N") for name in ("arm", "run", "step", "what")],
        )
    )
    return alt.layer(line, rules)


def _bars(figure: Figure) -> AnyChart:
    """A bar an arm, by what the time went to."""
    shade = alt.Color("part:N", title=None, scale=alt.Scale(scheme="set2"), legend=alt.Legend(orient="top", columns=2))
    return (
        _base(figure)
        .mark_bar()
        .encode(
            y=alt.Y("arm:N", title=None, sort=None, axis=alt.Axis(labelLimit=150)),
            x=alt.X("seconds:Q", title="seconds, mean of the runs", axis=alt.Axis(format="~s")),
            color=shade,
            tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("part:N"), alt.Tooltip("seconds:Q", format=",.1f")],
        )
    )


_LOSS = "Mean of an arm's seeds, no token dropped in validation; the band reaches from the least to the most of them."
_DASHES = {"resize": [2, 3], "restart": [7, 3], "fork": [1, 0]}
_MARKED = (
    "Of an arm's run that came furthest. Dotted rules: changes of workers; dashed rules: restarts; whole ones: forks."
)
FIGURES = (
    *(
        Figure(
            name=f"loss-{name}",
            title=f"Validation loss over {_AXES[x][1]}",
            about=_LOSS
            + (" Training time is the mean of the seeds, validation and pauses left out." if x == "seconds" else ""),
            data="validation",
            x=x,
            y="loss",
            y_title="validation loss, nats",
            draw=_curve,
        )
        for name, x in (("steps", "step"), ("layer-tokens", "layer_tokens"), ("flops", "flops"), ("time", "seconds"))
    ),
    Figure(
        name="training-loss",
        title="Training loss over steps",
        about="Mean of the steps since the point before, and of the seeds; the band is from the least seed to the most."
        " With tokens dropped it is another loss than without.",
        data="training",
        x="step",
        y="loss",
        y_title="training loss, nats",
        draw=_curve,
    ),
    *(
        Figure(name=name, title=title, about=_MARKED, data="schedule", x="step", y=y, y_title=unit, draw=_stepped)
        for name, title, y, unit in (
            ("kept-length", "Kept length over steps", "kept_length", "tokens kept of a sequence"),
            ("learning-rate", "Learning rate over steps", "lr", "learning rate"),
            ("workers", "Workers over steps", "world_size", "workers"),
        )
    ),
    Figure(
        name="throughput",
        title="Throughput over steps",
        about="Median of the steps around, and 10% to 90% of them.",
        data="throughput",
        x="step",
        y="tokens_per_s",
        y_title="tokens a second",
        draw=_curve,
    ),
    Figure(
        name="time",
        title="Where the time went",
        about="As far as runs record it. Saving checkpoints is part of the steps.",
        data="time",
        x="part",
        y="seconds",
        draw=_bars,
    ),
)


def palette(arms: Sequence[str]) -> list[str]:
    """A colour for each arm, to be told apart on light and on dark ground."""
    ten = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#c9a400", "#9d755d", "#ff7f9e", "#8a8a8a")
    more = [f"hsl({number * 137.5 % 360:.0f}, 55%, 52%)" for number in range(len(arms))]
    return list(ten[: len(arms)]) if len(arms) <= len(ten) else more


def drawable(figure: Figure, data: Mapping[str, Rows]) -> bool:
    """Whether there is anything to draw."""
    return any(row.get(figure.y) is not None for row in data[figure.data])


def spec_of(figure: Figure, arms: Sequence[str], *, marked: bool, legend: bool) -> Spec:
    """A chart without its data.

    Args:
        arms: their labels, in the order of their colours.
        marked: whether there are marks of resizes, restarts and forks.
        legend: whether it has one of its own; on the page there is one for all charts.
    """
    chart = figure.draw(figure).properties(description=f"{figure.title}. {figure.about}")
    spec: Spec = chart.to_dict()
    if figure.data == "schedule" and not marked:
        del spec["layer"][1]
    scale = {"domain": [*arms], "range": palette(arms)}
    for layer in spec.get("layer", [spec]):
        color = layer["encoding"].get("color", {})
        if color.get("field") == "arm":
            color |= {"scale": scale, "legend": {"title": None, "orient": "bottom", "columns": 2} if legend else None}
    spec.pop("config", None)
    return spec | {"params": [{"name": "shown", "value": [*arms]}]}
