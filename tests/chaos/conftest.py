"""Chaos: processes are killed at random, addressed moments, and nothing may show it.

`make chaos` kills many; without TOKENDROP_KILLS, two a test.
"""

import os
import random
from collections import Counter

import pytest

TALLY = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Counter()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tally = config.stash[TALLY]
    if tally:
        kinds = ", ".join(f"{count} {victim}" for victim, count in tally.items())
        terminalreporter.section(f"{tally.total()} kills: {kinds}")


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> "Counter[str]":
    """Of what was killed; shown when all tests are done."""
    return request.config.stash[TALLY]


@pytest.fixture
def kills() -> int:
    """How many processes a test kills."""
    return int(os.environ.get("TOKENDROP_KILLS", "2"))


@pytest.fixture
def chance() -> random.Random:
    """When to kill; by TOKENDROP_CHAOS_SEED."""
    return random.Random(int(os.environ.get("TOKENDROP_CHAOS_SEED", "1")))
