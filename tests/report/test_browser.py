"""The page in a real browser: it draws every chart, asks nobody for anything and complains of nothing."""

import re
import subprocess
from pathlib import Path

from browser import FLAGS, find_chromium
from recorded import record
from tokendrop.cli.main import main
from tokendrop.report.charts import FIGURES


def test_every_chart_has_marks_and_the_console_is_empty(tmp_path: Path) -> None:
    chromium = find_chromium()
    for seed in (1, 2):
        record(tmp_path / "runs" / f"drops-{seed}", seed=seed, name="drops")
        record(tmp_path / "runs" / f"whole-{seed}", seed=seed, name="whole", drop={"method": "none"})
    run = tmp_path / "runs" / "elastic"
    record(run, last=4, committed=False, name="elastic")
    record(run, first=4, world_size=2, name="elastic")
    page = tmp_path / "page.html"
    main(["report", str(tmp_path / "runs"), "--to", str(page)])
    command = [chromium, *FLAGS, f"--user-data-dir={tmp_path}/profile", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=20000", f"file://{page}"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert "data-drawn-ms=" in done.stdout
    for figure in FIGURES:
        (drawn,) = re.findall(rf'<figure id="{figure.name}".*?</figure>', done.stdout, re.DOTALL)
        svg = re.search(r"<svg.*?</svg>", drawn, re.DOTALL)
        assert svg, figure.name
        assert f'aria-label="{figure.title}' in drawn
        assert re.search(r'<g class="mark-(?:line|rect|area)[^>]*>(?:<path|<g)', svg[0]), figure.name
        assert "NaN" not in svg[0], figure.name
