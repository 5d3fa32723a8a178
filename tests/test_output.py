"""What commands print, and where."""

import json

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
