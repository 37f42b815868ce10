"""A real Grid Engine: hvdrun in a job of a parallel environment."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import debian
from cluster.grid_engine import PACKAGES, GridEngine
from cluster.jobs import MEET
from cluster.lab import Lab

pytestmark = pytest.mark.cluster

HVDRUN = f"{sys.executable} -m hvdkit.launch"


@pytest.fixture(scope="module")
def cell(hosts: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridEngine]:
    """Grid Engine on all hosts; for other fixtures. Tests take `grid_engine`."""
    try:
        usr = debian.unpack("gridengine", PACKAGES, tmp_path_factory.mktemp("gridengine"))
    except RuntimeError as error:
        pytest.skip(str(error))
    with debian.over_usr(hosts, usr):
        grid_engine = GridEngine(hosts, usr)
        try:
            grid_engine.up()
            yield grid_engine
        finally:
            grid_engine.down()


@pytest.fixture
def grid_engine(lab: Lab, cell: GridEngine) -> GridEngine:
    """Grid Engine without a job."""
    return cell


def test_hvdrun_takes_hosts_and_slots_and_starts_through_qrsh(grid_engine: GridEngine, tmp_path: Path) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text("#!/bin/sh\nexit 255\n")  # many sites allow none between their hosts
    ssh.chmod(0o755)
    body = f"export PATH={ssh.parent}:$PATH\ncat $PE_HOSTFILE\n{HVDRUN} {sys.executable} {MEET}"
    code, output = grid_engine.batch(tmp_path, body, "-pe", "two_a_host", "4")
    assert code == 0, output
    hosts = re.findall(r"^(node\d) 2 all\.q@", output, re.MULTILINE)
    said = [f"rank {rank} of 4 on {hosts[rank // 2]}, {rank % 2} of 2 there" for rank in range(4)]
    assert sorted(re.findall(r"rank \d of .*", output)) == said
    assert re.search(rf"4 ranks on {hosts[0]}:2, {hosts[1]}:2, from SGE job \d+\.", output)


def test_what_qdel_ends_leaves_nothing(grid_engine: GridEngine, tmp_path: Path) -> None:
    script, output = tmp_path / "job.sh", tmp_path / "job.out"
    script.write_text(f"#!/bin/bash\n{HVDRUN} sh -c \"trap '' TERM; echo up; sleep 300 & sleep 301\"\n")
    job = grid_engine.submit(script, output, "-pe", "two_a_host", "4")
    grid_engine.wait_for(lambda: output.exists() and output.read_text().count("up\n") == 4)
    assert grid_engine.run("qdel", job).returncode == 0
    grid_engine.wait_for(lambda: not grid_engine.lab.strays())
