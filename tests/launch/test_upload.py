"""What is listed before an upload is what Ray uploads."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from checkouts import ROOT
from heads import Head
from uploads import trees, write_tree

TREES = 25

LIST = "from pathlib import Path; print('holds', sorted(str(path) for path in Path().rglob('*') if path.is_file()))"
UPLOAD = f"""
import ast, json, shlex, sys, time
from tokendrop.launch import preflight, submit
upload = preflight.list_upload(sys.argv[1])
client, _ = submit.connect_dashboard(sys.argv[2])
job = submit.hand_over(client, "list", shlex.join(["python", "-c", {LIST!r}]), upload)
while not client.get_job_status(job).is_terminal():
    time.sleep(0.2)
holds = next(line for line in client.get_job_logs(job).splitlines() if line.startswith("holds "))
print(json.dumps([sorted(map(str, upload.sizes)), ast.literal_eval(holds.removeprefix("holds "))]))
"""


@pytest.mark.ray
@settings(max_examples=3, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(inside=st.lists(trees, min_size=TREES, max_size=TREES))
def test_what_is_listed_is_what_ray_uploads(head: Head, inside: list[object]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "uploaded"
        write_tree(folder, (dict(zip(map(str, range(TREES)), inside, strict=True)), {".gitignore": ["never*"]}))
        for name in ("always", "never"):
            (folder / name).touch()
        done = subprocess.run(
            [sys.executable, "-c", UPLOAD, folder, head.address],
            env=head.environment | {"PYTHONPATH": str(ROOT / "platform")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        listed, uploaded = json.loads(done.stdout)
        assert listed == uploaded
        assert "always" in listed
        assert "never" not in listed
        assert done.stderr == ""
