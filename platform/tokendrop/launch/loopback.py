"""Where a Ray that this process starts will listen; decided before Ray is imported."""

import os


def keep_on_loopback() -> None:
    """Let it listen on the loopback device alone, which no other machine reaches.

    Ray reads the variable when it is imported; it says whether other machines may join.
    """
    if os.environ.get("RAY_ADDRESS", "") in ("", "local"):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
