"""Who reaches a Ray that this process starts; decided before Ray is imported, which reads it then."""

import os
import secrets

_TOKEN = secrets.token_hex(32)  # in no file; Ray reads it once in a process


def close_to_others() -> None:
    """Let a Ray of this process listen on the loopback device alone, and let in nobody without its token.

    Does nothing for a process that joins a cluster, at RAY_ADDRESS.
    """
    if os.environ.get("RAY_ADDRESS", "") in ("", "local"):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # whether other machines may join
        os.environ["RAY_AUTH_MODE"] = "token"  # before 2.59, Ray lets everybody in where it is not set
        os.environ["RAY_AUTH_TOKEN"] = _TOKEN
