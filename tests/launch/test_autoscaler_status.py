"""What is read from `ray status --verbose`."""

import pytest

from tokendrop.launch.autoscaler_status import parse_status

REPORT = """======== Autoscaler status: 2026-01-02 03:04:05 ========
GCS request time: 0.001s

Node status
--------------------------------------------------------
Active:
 1 node
Idle:
 1 ray.head.default
Pending:
 node, 2 launching
 node-3: node, starting ray
Recent failures:
 node: NodeTerminated (instance_id: node-7)

Resources
--------------------------------------------------------
Total Usage:
 1.0/2.0 CPU (1.0 used of 1.0 reserved in placement groups)
 0.0/1.0 GPU
 0B/1.00GiB object_store_memory

From request_resources:
 {'CPU': 1.0}: 4 from request_resources()
Pending Demands:
 {'CPU': 1.0, 'GPU': 0.5}: 3+ pending tasks/actors
 {'CPU': 2.0} * 2, {'GPU': 1.0} * 1 (PACK): 1+ pending placement groups

Node: head (ray.head.default)
 Id: 00ff
 Idle: 1200 ms
 Usage:
  0B/1.00GiB object_store_memory
 Activity:
  (no activity)

Node: node-1 (node)
 Id: 11ff
 Usage:
  1.0/2.0 CPU
  0.0/1.0 GPU
 Activity:
  Resource: CPU currently in use.
"""


def test_a_report_is_read_whole() -> None:
    status = parse_status(REPORT)
    head, node = status.nodes
    assert (head.name, head.id, head.is_idle, head.total) == ("head", "00ff", True, {})
    assert (node.name, node.id, node.is_idle) == ("node-1", "11ff", False)
    assert (node.used, node.total) == ({"CPU": 1, "GPU": 0}, {"CPU": 2, "GPU": 1})
    assert (status.use.used, status.use.total) == ({"CPU": 1, "GPU": 0}, {"CPU": 2, "GPU": 1})
    assert status.pending == 3
    assert status.requested == [
        ({"CPU": 1}, 4),
        ({"CPU": 1, "GPU": 0.5}, 3),
        ({"CPU": 2}, 2),
        ({"GPU": 1}, 1),
    ]


@pytest.mark.parametrize("text", ["", "No cluster status. It may take a few seconds for Ray's services to start up.\n"])
def test_something_else_is_no_report(text: str) -> None:
    with pytest.raises(ValueError, match="want a report of Ray's autoscaler"):
        parse_status(text)
