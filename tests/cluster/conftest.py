"""The lab as fixtures: started once, made whole again after each test, which fails if it left a process on a host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.lab import Lab
from cluster.needs import missing_for_hosts, missing_for_slurm
from cluster.slurm import Slurm


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three hosts, node1 to node3; for other fixtures. Tests take `lab`."""
    if problem := missing_for_hosts():
        pytest.skip(problem)
    lab = Lab(tmp_path_factory.mktemp("lab"), shared=[tmp_path_factory.getbasetemp()])
    try:
        lab.up()
        yield lab
    finally:
        lab.close()


@pytest.fixture
def lab(hosts: Lab) -> Iterator[Lab]:
    """Three healthy hosts with nothing running on them."""
    yield hosts
    left = hosts.restore()
    assert not left, f"the test left processes on hosts: {left}"


@pytest.fixture(scope="session")
def daemons(hosts: Lab) -> Iterator[Slurm]:
    """Slurm on all hosts; for other fixtures. Tests take `slurm`."""
    if problem := missing_for_slurm():
        pytest.skip(problem)
    slurm = Slurm(hosts)
    slurm.up()
    yield slurm


@pytest.fixture
def slurm(lab: Lab, daemons: Slurm) -> Iterator[Slurm]:
    """Slurm with idle hosts and no job, on the hosts too that an earlier test halted or cut off."""
    daemons.ready()
    yield daemons
    daemons.cancel_all()
