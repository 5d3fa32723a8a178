"""One chart as a file of its own: SVG or PNG, without a browser."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import vl_convert

from tokendrop.atomic import atomic_write
from tokendrop.errors import UserError
from tokendrop.report.charts import FIGURES, drawable, spec_of
from tokendrop.report.curves import Rows

FORMATS = (".svg", ".png")


def write_figure(name: str, arms: Sequence[str], data: Mapping[str, Rows], to: Path) -> None:
    """Write a chart of runs.

    Args:
        arms: their labels.
    Raises:
        UserError: the runs have nothing to draw there.
    """
    (figure,) = (one for one in FIGURES if one.name == name)
    if not drawable(figure, data):
        raise UserError(f"--figure: these runs have nothing recorded for {name}; want another figure")
    spec = {
        **spec_of(figure, arms, marked=bool(data["marks"]), legend=True),
        "datasets": {key: data[key] for key in (figure.data, "marks")},
    }
    spec |= {"width": 560, "height": 320, "title": figure.title, "background": "white"}
    if to.suffix == ".svg":
        content = vl_convert.vegalite_to_svg(spec).encode()
    else:
        content = vl_convert.vegalite_to_png(spec, scale=2)
    atomic_write(to, content)
