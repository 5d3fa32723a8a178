"""The same work on several inputs at once: one that is wrong ends it, and not the process that asked."""

import os
import subprocess
import sys

import pytest

ROUNDS = """
from tokendrop.launch.loopback import close_to_others

close_to_others()

import random
import time

from tokendrop.errors import UserError
from tokendrop.launch.cluster import connect
from tokendrop.launch.parallel import in_parallel

def work(seconds):
    if seconds == 0:
        raise UserError("0 is wrong")
    time.sleep(seconds)  # the others end as the first one fails, and soon after
    return seconds

connect(cpus=4)
for _ in range(200):
    try:
        in_parallel(work, [0.0, *(random.uniform(0.001, 0.03) for _ in range(7))])
    except UserError as error:
        assert str(error) == "0 is wrong"
    else:
        raise AssertionError("nothing was raised")
assert in_parallel(work, [0.01, 0.02, 0.03]) == [0.01, 0.02, 0.03]
print("200 rounds")
"""


@pytest.mark.ray
@pytest.mark.long
def test_a_mistake_in_one_input_does_not_end_the_process() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", ROUNDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("200 rounds\n")
