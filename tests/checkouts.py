"""A checkout as a user has it, from which jobs are submitted."""

import json
import shutil
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MIB = 2**20

JOB = {
    "name": "tiny",
    "model": {
        "kind": "gpt",
        "layers": 3,
        "width": 32,
        "heads": 2,
        "sequence_length": 32,
        "vocab_size": 512,
    },
    "data": {"corpus": ["text/*"], "tokenizer_vocab_size": 300, "validation_share": 0.2},
    "train": {"length": "3 steps", "global_batch": 8, "micro_batch": 4, "peak_lr": 1e-3},
    "drop": {
        "method": "random_ltd",
        "schedule": {"kind": "linear", "start": 8, "until": "70%", "increment": 4},
    },
    "scaling": {"workers": 1, "cpus_per_worker": 1},
    "checkpoint": {"every": "3 steps"},
    "evaluate": {"every": "3 steps", "sequences": 8},
    "track": {"uri": None},
}
"""Small enough to be done in seconds; its corpus is a relative path."""


def make_folder(folder: Path) -> Path:
    """A checkout as a user has it: the job and its text in it, the text out of git."""
    for name in ("jobs", "platform"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (folder / ".gitignore").write_text("/text/\n/runs/\n")
    (folder / "jobs" / "tiny.yaml").write_text(yaml.safe_dump(JOB))
    (folder / "text").mkdir()
    words = [" ".join(f"word{(number * 31 + i * i) % 97}" for i in range(100)) for number in range(60)]
    (folder / "text" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    return folder


def dependencies_alone(folder: Path) -> Path:
    """A Python with the packages of this one, less those installed as a link to their source: tokendrop."""
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    # a line of a .pth file adds a folder, but not what the .pth files in that folder add
    installed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(installed))
    python = folder / "bin" / "python"
    # -E: a Ray that this session started has put the source tree on PYTHONPATH
    command = [python, "-E", "-c", "import tokendrop"]
    found = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    if "No module named 'tokendrop'" not in found.stderr:
        pytest.skip("tokendrop is installed here as a copy, not with `pip install -e`")
    return python


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
