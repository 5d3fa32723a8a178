"""`tokendrop bench workers` gives what its README tells of, and its bounds hold for whatever number it makes up."""

import json

import pytest

from tokendrop.cli.main import main
from tokendrop.track.run_metrics import MOST_SERIES

WORKERS, STEPS, COMMITS, EDGES = 16, 20, 10, 9


def test_what_is_bounded_does_not_depend_on_the_workers(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "workers", "--workers", f"{WORKERS}", "--steps", f"{STEPS}", "--json"])
    figures = {name: one["median"] for name, one in json.loads(capsys.readouterr().out)["figures"].items()}
    assert figures["ledger_parts"] == figures["steps_parts"] == COMMITS
    assert figures["ledger_bytes_per_step"] * STEPS <= figures["ledger_largest_part_bytes"] * COMMITS
    assert 0 < figures["series_of_run"] <= MOST_SERIES
    assert figures["series_of_ranks_on_request"] == 2 * WORKERS
    assert figures["resizes"] >= EDGES
    assert figures["fsdp_index_bytes"] < 32 * figures["fsdp_parts"] + 200 * figures["ddp_parts"]
    assert figures["ddp_parts"] <= figures["fsdp_parts"] <= WORKERS * figures["ddp_parts"]
    assert all(value > 0 for name, value in figures.items() if name.endswith(("_s", "_ms", "_us", "_bytes")))


def test_half_of_the_workers_must_be_a_whole_number(complaint) -> None:
    assert complaint("bench", "workers", "--workers", "7") == (
        "--workers 7: want an even number, for half of them train now and then"
    )
