"""Dashboards are what their Python says, ask for metrics that are exported, and rules fire when they should."""

import re
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from boards import FOLDER, NAMES, filled, marks, panels, queries, read
from tokendrop.track.prometheus import EXPLAINED, legal_name

ROOT = FOLDER.parent
OF_RAY = {"ray_node_cpu_count", "ray_node_mem_total"}
EXPORTED = {f"ray_{legal_name(metric)}" for metric in EXPLAINED}
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"] for rule in group["rules"]
]
QUERIES = [one for name in NAMES for one in (*queries(name), *marks(name))]
QUERIES += [(f"rules: {rule.get('alert') or rule['record']}", rule["expr"]) for rule in RULES]


def test_the_dashboards_are_those_that_their_python_makes(tmp_path: Path) -> None:
    command = [sys.executable, FOLDER / "make.py", "--to", tmp_path]
    subprocess.run(command, env={"PYTHONPATH": str(ROOT / "platform")}, check=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in FOLDER.glob("*.json")}, "want `make dashboards`"
    assert made.keys() == {f"{name}.json" for name in NAMES}


@pytest.mark.parametrize("query", [query for _, query in QUERIES], ids=[where for where, _ in QUERIES])
def test_every_query_parses_and_asks_for_what_is_exported(query: str) -> None:
    query = filled(query)
    promql_parser.parse(query)
    metrics = {*re.findall(r"\bray_\w+|\btokendrop:\w+(?::\w+)?", query)}
    assert metrics
    assert metrics <= EXPORTED | OF_RAY | {rule.get("record") for rule in RULES}


def test_a_query_that_is_none_does_not_parse() -> None:
    with pytest.raises(ValueError, match="invalid"):
        promql_parser.parse("max by (run (x))")


@pytest.mark.parametrize("name", NAMES)
def test_panels_of_a_dashboard_have_numbers_of_their_own_and_do_not_overlap(name: str) -> None:
    board = read(name)
    numbers = [panel["id"] for panel in board["panels"]]
    assert len({*numbers}) == len(numbers)
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(one["x"] >= 0 and one["x"] + one["w"] <= 24 for one in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    assert all(panel["description"] for panel in panels(name))


def test_dashboards_have_names_of_their_own_and_variables_for_all_that_they_ask_by() -> None:
    assert len({read(name)["uid"] for name in NAMES}) == len(NAMES)
    for name in NAMES:
        known = {one["name"] for one in read(name)["templating"]["list"]}
        asked = {word for _, query in (*queries(name), *marks(name)) for word in re.findall(r"\$([a-z]\w*)", query)}
        assert asked <= known
        assert {"datasource", "sweep"} <= known


def test_grafana_and_prometheus_are_told_of_files_that_are_there() -> None:
    scraped = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert [(FOLDER / one).is_file() for one in scraped["rule_files"]] == [True]
    provisioning = FOLDER / "provisioning"
    providers = yaml.safe_load((provisioning / "dashboards" / "tokendrop.yaml").read_text())["providers"]
    guide = (FOLDER / "README.md").read_text()
    assert all(f"{one['options']['path'].removeprefix('$')}=" in guide for one in providers)
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"


def test_rules_fire_when_they_should(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool here")
    subprocess.run([promtool, "check", "rules", FOLDER / "rules.yaml"], check=True)
    told = yaml.safe_load((FOLDER / "rules_test.yaml").read_text())
    told_of = {one["alertname"] for test in told["tests"] for one in test.get("alert_rule_test", [])}
    assert {rule["alert"] for rule in RULES if "alert" in rule} <= told_of | {"TokendropRestartsOften"}
    subprocess.run([promtool, "test", "rules", FOLDER / "rules_test.yaml"], check=True)
    shutil.copy(FOLDER / "rules_test.yaml", tmp_path)
    whole = (FOLDER / "rules.yaml").read_text()
    limits = re.findall(r"[<>] [\d.]+$", whole, re.MULTILINE)
    assert len(limits) == len(told_of) + 1
    for limit in limits:
        never = "< 0" if limit.startswith("<") else "> 1e9"
        (tmp_path / "rules.yaml").write_text(re.sub(rf"{limit}$", never, whole, flags=re.MULTILINE))
        done = subprocess.run([promtool, "test", "rules", tmp_path / "rules_test.yaml"], check=False)
        assert done.returncode, f"{limit} is not held"
