"""Long tests that would begin after TOKENDROP_LONG_TESTS_UNTIL, in seconds since 1970, are skipped by name."""

import os
import time

import pytest

UNTIL = "TOKENDROP_LONG_TESTS_UNTIL"


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = os.environ.get(UNTIL)
    if until and time.time() > float(until) and any(item.iter_markers("long")) | any(item.iter_markers("alone")):
        pytest.skip("no time is left for long tests")
