"""A small real job on all hosts, started by hvdrun as any other, and timed."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvdkit.launch.hostfiles import Host
from hvdkit.launch.process import ProcessResult, run_program
from hvdkit.tools.doctor.collect.probes import probe_argv, read_object
from hvdkit.tools.doctor.survey import Allreduce, Rank, Survey, find_common_subnets

COUNT = 1 << 22  # of float32: 16 MiB
_TIMEOUT_S = 15.0
_CHOICE = "OMPI_MCA_btl_tcp_if_include"
#: More than one TCP stream of Python or MPI is good for; faster networks are not judged by this.
_FASTEST_MBIT = 8000.0


def time_allreduce(hosts: Sequence[Host], environ: Mapping[str, str], survey: Survey) -> Allreduce:
    """Start one rank a slot, two a host at most, and let them sum; needs ssh and MPI to work.

    If it fails or is slow, and the hosts share a network, it is tried again over that network alone.
    """
    job = _run(hosts, environ, survey)
    networks = find_common_subnets(survey)
    if not (job.error or job.slow) or not networks or _CHOICE in environ or survey.here.hvdrun.kind != "open_mpi":
        return job
    again = _run(hosts, {**environ, _CHOICE: str(networks[0])}, survey)
    if again.error or (not job.error and again.seconds > job.seconds / 2):
        return job
    return replace(job, remedy=f"{_CHOICE}={networks[0]}", remedy_s=again.seconds)


def _run(hosts: Sequence[Host], environ: Mapping[str, str], survey: Survey) -> Allreduce:
    places = ",".join(f"{_bracket(host.login)}:{min(2, host.slots or 1)}" for host in hosts)
    # Without hvdkit's own binding, what the launcher does by itself is seen.
    hvdrun = [sys.executable, "-m", "hvdkit.launch", "--bind=none", *survey.ssh_options, "-H", places]
    result = run_program([*hvdrun, *probe_argv("time_allreduce", str(COUNT))], environ=environ, timeout_s=_TIMEOUT_S)
    objects = [found for line in result.stdout.splitlines() if (found := read_object(line))]
    ranks = tuple(
        Rank(item["rank"], item["host"], item["size"], item["cores"], item.get("visible"))
        for item in objects
        if "rank" in item
    )
    timed = next((item for item in objects if "seconds" in item), None)
    if timed is None or result.status != 0:
        return Allreduce(ranks=ranks, error=_explain(result))
    slowest_mbit = min((each.mbit for each in survey.reaches if each.named and each.mbit), default=0.0)
    expected = expect_seconds(COUNT * 4, len(hosts), slowest_mbit)
    return Allreduce(COUNT * 4, timed["seconds"], expected, timed["transport"], ranks)


def expect_seconds(size: int, hosts: int, mbit: float) -> float:
    """What a ring takes to sum `size` bytes between hosts whose slowest way gives `mbit`; 0.0 if that is unknown."""
    if hosts < 2 or mbit <= 0:
        return 0.0
    return 2 * (hosts - 1) / hosts * size * 8e-6 / min(mbit, _FASTEST_MBIT)


def _explain(result: ProcessResult) -> str:
    lines = [line.strip() for line in result.output.splitlines() if line.strip() and not read_object(line)]
    telling = [line for line in lines if re.search(r"error|refused|cannot|unable|fail|not ", line, re.IGNORECASE)]
    said = next(iter(telling or lines), "nothing was printed")
    return f"{result.ending}: {said}"


def _bracket(login: str) -> str:
    user, at, name = login.rpartition("@")
    return f"{user}{at}[{name}]" if ":" in name else login
