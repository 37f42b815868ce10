"""The lab as fixtures: started once, made whole again after each test, which fails if it left a process on a host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from cluster.host_faults import folders_of, hidden
from cluster.lab import Lab
from cluster.needs import missing_for_hosts, missing_for_slurm
from cluster.other_mpi import make_python
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


@pytest.fixture
def without_horovod(lab: Lab) -> Iterator[None]:
    """Hosts whose environment has no Horovod: doctor loads it on each, with its frameworks, for ten seconds here."""
    with contextlib.ExitStack() as stack:
        for host in lab.names:
            stack.enter_context(hidden(lab, host, *folders_of("horovod")))
        yield


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


@pytest.fixture(scope="session")
def mpich_python(tmp_path_factory: pytest.TempPathFactory, hosts: Lab) -> str:
    """The python of an environment with MPICH."""
    try:
        return str(make_python(tmp_path_factory.mktemp("mpich") / "env"))
    except RuntimeError as error:
        pytest.skip(str(error))
