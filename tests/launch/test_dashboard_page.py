"""Ray's dashboard of a submitted run, in a real browser: one logs in with the token, and finds the job by its name."""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from browser import browser, find_chromium
from heads import TOKEN, Head

pytestmark = [pytest.mark.ray, pytest.mark.long]


def ask(head: Head, path: str) -> Any:
    """What the dashboard's own API answers."""
    asked = urllib.request.Request(f"{head.address}{path}", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return json.load(answer)


def test_the_dashboard_lists_the_job_and_its_run_of_ray_train(head: Head, tmp_path: Path) -> None:
    chromium = find_chromium()
    submit = (sys.executable, "-m", "tokendrop", "submit", "jobs/tiny.yaml", "name=shown")
    done = head.run(*submit, "--address", head.address, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (trained,) = ask(head, "/api/train/v2/runs/v1")["train_runs"]  # of which Ray's page of 2.60 has none
    assert (trained["name"], trained["status"]) == (Path(result["result"]["run"]).name, "FINISHED")
    with browser(chromium, tmp_path) as page:
        page.open(head.address)
        page.wait_for("Authentication Token Required")
        page.type("input[type=password]", TOKEN)  # Enter submits it
        page.wait("document.querySelector('input[type=password]') === null")
        page.open(f"{head.address}/#/jobs")
        page.wait_for("shown", result["job"], "SUCCEEDED", "jobs/tiny.yaml")
        page.picture("ray-jobs")
        page.open(f"{head.address}/#/jobs/{result['job']}")
        page.wait_for("Entrypoint", "SUCCEEDED", result["job"])
        page.picture("ray-job")
