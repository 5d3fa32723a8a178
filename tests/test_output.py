"""What commands print, and where."""

import json

import pytest

from tokendrop.output import print_json, print_text, results_alone


def test_standard_output_holds_results_alone_whatever_libraries_print(capsys):
    with results_alone():
        print("(raylet) WARNING: a line of a library")
        print_json({"steps": 3})
        print_text("three steps")
    print("later")
    shown = capsys.readouterr()
    assert shown.out == json.dumps({"steps": 3}, indent=1) + "\nthree steps\nlater\n"
    assert shown.err == "(raylet) WARNING: a line of a library\n"


def test_numbers_that_json_can_not_say_are_null(capsys):
    print_json({"val_loss": [float("nan"), 1.5], "more": ({"perplexity": float("inf")},)})
    told = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert told == {"val_loss": [None, 1.5], "more": [{"perplexity": None}]}
