"""Scripts for torchrun under hvdrun on three hosts: they meet on the network that hvdrun chose for the job."""

from __future__ import annotations

import sys

import pytest
from cluster.jobs import EVERYWHERE, HVDRUN
from cluster.lab import ROOT, Lab
from test_torch_scripts import NEEDS, SCRIPTS, check_reports, read_reports

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py", "accelerated.py", "lightning_fit.py"])
def test_a_script_for_torchrun_trains_on_three_hosts(lab: Lab, name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    command = [*HVDRUN, "-np", "3", "-H", EVERYWHERE, sys.executable, str(SCRIPTS / name)]
    done = lab.run("node1", command, timeout=140)
    assert done.returncode == 0, done.stdout + done.stderr
    check_reports(read_reports(done.stdout), 3)


def test_the_address_is_rank_0s_on_the_chosen_network(lab: Lab) -> None:
    show = "import os; print(os.environ['MASTER_ADDR'], os.environ['GROUP_RANK'], os.environ['LOCAL_RANK'])"
    command = [*HVDRUN, "-np", "3", "--verbose", "-H", "node2:1,node1:1,node3:1", sys.executable, "-c", show]
    done = lab.run("node1", command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    (address,) = {line[2] for line in words}
    assert f"{address.rpartition('.')[0]}.0/" in done.stderr, "not on the network that --verbose names"
    assert sorted((line[1], line[3], line[4]) for line in words) == [
        ("node1]", "1", "0"),
        ("node2]", "0", "0"),
        ("node3]", "2", "0"),
    ]
