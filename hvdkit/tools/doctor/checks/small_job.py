"""Checks of the small job: does it run, are its ranks placed well, is it as fast as the network?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from hvdkit.tools.doctor.findings import Finding
from hvdkit.tools.doctor.survey import Survey


def check_small_job(survey: Survey) -> Iterator[Finding]:
    """Check the job, if one was run."""
    job = survey.allreduce
    if job is None:
        return
    if job.error:
        yield Finding(
            "error",
            "job-fails",
            f"An allreduce of 16 MiB over all hosts fails: {job.error}",
            f"It works over one network alone: set {job.remedy}."
            if job.remedy
            else "Correct the other findings first; then try: hvdrun --verbose -H ... hostname",
        )
    size = len(job.ranks)
    if size > 1 and any(rank.size != size for rank in job.ranks):
        sizes = sorted({rank.size for rank in job.ranks})
        yield Finding(
            "error",
            "singletons",
            f"{size} ranks were started, but their worlds have size {', '.join(map(str, sizes))}.",
            "The launcher and the library that mpi4py loads belong to different MPIs: run hvdkit doctor on each host.",
        )
    cores = {facts.host: len(facts.machine.cpu.allowed) for facts in survey.answering.values()}
    bound: dict[str, list[int]] = defaultdict(list)
    for rank in job.ranks:
        if rank.cores == 1 < cores.get(rank.host, 0):
            bound[rank.host].append(rank.rank)
    for host, ranks in bound.items():
        yield Finding(
            "warning",
            "rank-one-core",
            f"The launcher binds rank {', '.join(map(str, ranks))} on {host} to one core of {cores[host]}.",
            "Unset the variable that requests binding (OMPI_MCA_hwloc_base_binding_policy, "
            "PRTE_MCA_hwloc_default_binding_policy, HYDRA_BINDING, I_MPI_PIN), or set it to none.",
            (host,),
        )
    yield from _check_gpus(survey)
    if job.slow:
        yield Finding(
            "warning",
            "allreduce-slow",
            f"An allreduce of {job.bytes / 2**20:.0f} MiB over all hosts took {job.seconds:.2f} s; from the network's "
            f"bandwidth {job.expected_s:.2f} s are expected.",
            "MPI may use another interface: set OMPI_MCA_btl_tcp_if_include to the fast network; or the "
            "hosts are busy.",
        )


def _check_gpus(survey: Survey) -> Iterator[Finding]:
    """Find ranks of a host that have the same single GPU."""
    assert survey.allreduce is not None
    seen: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in survey.allreduce.ranks:
        if rank.visible and "," not in rank.visible:
            seen[(rank.host, rank.visible)].append(rank.rank)
    for (host, visible), ranks in seen.items():
        if len(ranks) > 1:
            yield Finding(
                "error",
                "gpu-for-two-ranks",
                f"Ranks {', '.join(map(str, ranks))} on {host} share one GPU (CUDA_VISIBLE_DEVICES={visible}).",
                "Unset CUDA_VISIBLE_DEVICES where the job is started, and choose the device by hvd.local_rank().",
                (host,),
            )
