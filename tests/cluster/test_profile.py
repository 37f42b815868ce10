"""hvdkit profile of a job on two hosts with a slow wire between them, of which one rank is late too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cluster.jobs import HVDRUN
from cluster.lab import Lab

pytestmark = pytest.mark.cluster

SCRIPT = str(Path(__file__).parents[1] / "support" / "profiled_script.py")


def test_a_slow_network_and_a_late_rank_are_told_apart(lab: Lab) -> None:
    """Half a megabyte takes a tenth of a second; rank 1 sleeps for half of that, and records on another host."""
    pytest.importorskip("torch")
    for host in ("node1", "node2"):
        lab.limit(host, "40mbit")
    job = [*HVDRUN, "-np", "2", "-H", "node1:1,node2:1", sys.executable, SCRIPT, "30", "slow=1,0,0.05"]
    done = lab.run("node1", [sys.executable, "-m", "hvdkit", "profile", "--json", "--", *job], timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["hosts"] == ["node1", "node2"]
    assert found["slow"]["ranks"] == [1] and found["slow"]["host"] == "node2"
    assert {"compression", "slow-rank"} <= {one["name"] for one in found["advice"]}, found
    assert found["network"]["known"] != "assumed"
