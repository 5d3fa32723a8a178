"""Chaos: processes are killed at random, addressed moments, and nothing may show it.

`make chaos` kills many; without it, TOKENDROP_KILLS is small, so that the tests run with all others.
"""

import os
import random

import pytest


@pytest.fixture
def kills() -> int:
    """How many processes a test kills."""
    return int(os.environ.get("TOKENDROP_KILLS", "2"))


@pytest.fixture
def chance() -> random.Random:
    """When to kill; by TOKENDROP_CHAOS_SEED."""
    return random.Random(int(os.environ.get("TOKENDROP_CHAOS_SEED", "1")))
