"""The page: one HTML file with its charts, its data and all that draws them in it."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2
import vl_convert

from tokendrop.report.arms import Arm
from tokendrop.report.charts import FIGURES, Figure, drawable, palette, spec_of
from tokendrop.report.curves import Rows
from tokendrop.report.tables import again, curve_table, profile_table, savings_table, sentences
from tokendrop.secrets import redact_all

_TEMPLATE = files("tokendrop.report") / "page.html"


def page_text(arms: Sequence[Arm], data: Mapping[str, Rows], *, notes: Sequence[str]) -> str:
    """The page of a report.

    Args:
        data: `curves.datasets` of the arms.
        notes: beside those of the runs.
    """
    labels = [arm.label for arm in arms]
    figures = [figure for figure in FIGURES if drawable(figure, data)]
    told = redact_all(
        {
            "title": "Runs: " + ", ".join(labels[:3]) + (f" and {len(labels) - 3} more" if len(labels) > 3 else ""),
            "sentences": sentences(arms),
            "notes": [*notes, *(note for arm in arms for run in arm.runs for note in run.notes())],
            "arms": [{"label": label, "color": color} for label, color in zip(labels, palette(labels), strict=True)],
            "savings": savings_table(arms),
            "profile": profile_table(arms),
            "figures": [_described(figure, data, labels) for figure in figures],
            "again": again(arms),
        }
    )
    scripts = {
        "data": _in_script(
            {name: data[name] for name in dict.fromkeys([*(figure.data for figure in figures), "marks"])}
        ),
        "specs": _in_script(
            {figure.name: spec_of(figure, labels, marked=bool(data["marks"]), legend=False) for figure in figures}
        ),
        "library": vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script"),
    }
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(**told, **scripts)


def _described(figure: Figure, data: Mapping[str, Rows], labels: Sequence[str]) -> dict[str, Any]:
    header, rows = curve_table(data[figure.data], figure.x, figure.y, labels)
    return {"name": figure.name, "title": figure.title, "about": figure.about, "header": header, "rows": rows}


def _in_script(tree: Any) -> str:
    """JSON that can stand in a script of a page; what is no finite number is null there already."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
