"""A skip that nobody knows of fails CI; real data is found beside a checkout in any folder."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from known_skips import LIST, is_known, read_list

ROOT = Path(__file__).parents[1]
SKIPS = """
import pytest

def test_that_is_run():
    pass

@pytest.mark.parametrize("number", [1, 2])
def test_that_is_skipped(number):
    pytest.skip("what it wants is away")

def test_on_real_data(real_data):
    assert real_data.name == "data"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Another folder with this project's way to run tests, and tests of its own."""
    folder = tmp_path / "elsewhere" / "clone"
    (folder / "tests").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("conftest.py", "known_skips.py", "time_left.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests")
    (folder / "tests" / "known_skips.txt").write_text("# none\n")
    (folder / "tests" / "test_some.py").write_text(SKIPS)
    return folder


def run_tests(checkout: Path, *options: str, **variables: str) -> tuple[int, str]:
    left_out = ("TOKENDROP_TEST_DATA", "PYTEST_ADDOPTS", "TOKENDROP_LONG_TESTS_UNTIL")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"PYTHONPATH": str(ROOT / "platform"), **variables}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *options]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_skip_that_is_not_listed_fails_the_tests_and_is_printed(checkout: Path) -> None:
    code, said = run_tests(checkout, PYTEST_ADDOPTS="--only-known-skips")
    assert code == 1, said
    assert "3 skipped, and not in tests/known_skips.txt" in said
    assert "tests/test_some.py::test_that_is_skipped[2]: what it wants is away\n" in said
    assert (
        f"no real data at {checkout.parent}/shared/data; set TOKENDROP_TEST_DATA to its folder, or to nothing" in said
    )
    assert "1 passed, 3 skipped" in said


def test_known_skips_pass_and_real_data_is_found_beside_the_checkout(checkout: Path) -> None:
    (checkout.parent / "shared" / "data").mkdir(parents=True)
    (checkout / "tests" / "known_skips.txt").write_text("tests/test_some.py::test_that_is_skipped: what it wants\n")
    code, said = run_tests(checkout, "--only-known-skips")
    assert code == 0, said
    assert "2 passed, 2 skipped" in said


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("tests/a.py::test_it: what it wants", True),
        ("*: what it wants is away", True),
        ("tests/a.py::test_it: another reason", False),
        ("tests/a.py::test_other: what it wants", False),
        ("*: ", False),
        ("tests/a.py::test_it", False),
        ("# *: what it wants", False),
    ],
)
def test_a_skip_is_known_by_its_test_and_its_reason(line: str, known: bool) -> None:
    assert is_known("tests/a.py::test_it[1]", "what it wants is away", read_list(f"{line}\n")) == known


@pytest.mark.parametrize(("until_s", "left_out"), [(-1, True), (3600, False)])
def test_long_tests_are_left_out_by_name_where_no_time_is_left(checkout: Path, until_s: int, left_out: bool) -> None:
    tests = "import pytest\n\ndef test_short():\n    pass\n"
    for mark in ("long", "alone"):
        tests += f"\n@pytest.mark.{mark}\ndef test_{mark}():\n    pass\n"
    (checkout / "tests" / "test_some.py").write_text(tests)
    shutil.copy(LIST, checkout / "tests")
    until = {"TOKENDROP_LONG_TESTS_UNTIL": str(int(time.time()) + until_s)}
    code, said = run_tests(checkout, "--only-known-skips", **until)
    assert code == 0, said
    assert ("1 passed, 2 skipped" if left_out else "3 passed") in said


def test_no_list_lets_missing_data_pass_unsaid() -> None:
    known = read_list(LIST.read_text())
    test = "tests/data/test_records.py::test_on_real_data"
    assert not is_known(test, "no real data at /shared/data; set TOKENDROP_TEST_DATA to its folder", known)
    assert is_known(test, "TOKENDROP_TEST_DATA is empty", known)


def test_every_listed_test_exists() -> None:
    for test, reason in read_list(LIST.read_text()):
        assert reason
        if test != "*":
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text()


def test_ci_asks_for_known_skips_alone() -> None:
    assert """--only-known-skips"\ntests test-all\n""" in (ROOT / ".ci" / "run").read_text()
