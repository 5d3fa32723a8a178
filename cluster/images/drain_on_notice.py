"""Tell Ray that this machine is about to be taken back, so that runs save themselves and leave it in time.

    python drain_on_notice.py aws | gcp | auto

Runs on each spot machine beside `ray start`, with its environment: asks the cloud's metadata address every two seconds,
and drains this node once, by `ray drain-node`. `auto` asks as AWS and as Google Cloud want it. Needs Ray alone.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime

METADATA = "http://169.254.169.254"  # of AWS and Google Cloud alike
POLL_S, ANSWER_S, AGAIN_S = 2.0, 2.0, 5.0
GCP_NOTICE_S = 25  # Google Cloud gives 30
# proxies are for the network outside
_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def ask(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """What the address answers; None where it has no such thing, or nobody is there."""
    try:
        with _OPEN(urllib.request.Request(url, headers=headers, method=method), timeout=ANSWER_S) as answer:
            return answer.read().decode()
    except (OSError, ValueError):
        return None


def aws_notice_s(metadata: str) -> float | None:
    """Seconds until EC2 takes this machine back; None without a notice."""
    token = ask(f"{metadata}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    if token is None:
        return None
    notice = ask(f"{metadata}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    try:
        at = datetime.fromisoformat(json.loads(notice or "")["time"])
    except (ValueError, TypeError, KeyError):
        return None
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


def gcp_notice_s(metadata: str) -> float | None:
    """Seconds until Google Cloud takes this machine back; None without a notice."""
    answer = ask(f"{metadata}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return GCP_NOTICE_S if answer is not None and answer.strip() == "TRUE" else None


NOTICES = {"aws": [aws_notice_s], "gcp": [gcp_notice_s], "auto": [aws_notice_s, gcp_notice_s]}


def this_node() -> str:
    """Ray's id of this machine; waits for `ray start`."""
    import ray

    while True:
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
            return ray.get_runtime_context().get_node_id()
        except Exception as error:  # Ray raises several kinds where it has not started yet
            print(f"waiting for Ray: {error}", flush=True)
            time.sleep(AGAIN_S)
        finally:
            ray.shutdown()


def drain(node: str, left_s: float) -> bool:
    """Whether Ray has taken the notice."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--node-id={node}"]
    command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=the cloud takes this spot machine back"]
    return subprocess.run([*command, f"--deadline-remaining-seconds={int(left_s)}"], check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cloud", choices=NOTICES)
    parser.add_argument("--metadata", default=METADATA, help="another address, for trying this out")
    options = parser.parse_args()
    print(f"watching for a notice to node {this_node()}", flush=True)
    while True:
        noticed = [left_s for notice_s in NOTICES[options.cloud] if (left_s := notice_s(options.metadata)) is not None]
        # by its id of now: a Ray that was started again has another one
        if noticed and drain(node := this_node(), min(noticed)):
            print(f"drained node {node}, {min(noticed):.0f} s before its end", flush=True)
            return
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
