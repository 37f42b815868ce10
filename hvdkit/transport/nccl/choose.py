"""Do these ranks reduce in device memory? What each of them says, and what all of them conclude from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.transport.nccl.library import Version


@dataclass(frozen=True)
class Finding:
    """One rank's.

    problem: why it cannot use NCCL; "" if it can. host: its name. gpu: its uuid; "" if its tensors are not on one GPU.
    index: of the GPU among those that the process sees. version: of NCCL. shares: may the rank share its GPU?
    """

    problem: str = ""
    host: str = ""
    gpu: str = ""
    index: int = 0
    version: Version = (0, 0, 0)
    shares: bool = False


def find_problem(findings: Sequence[Finding]) -> str:
    """Why these ranks cannot use NCCL together, and what to do; "" if they can. The same on all ranks."""
    for rank, finding in enumerate(findings):
        if finding.problem:
            return f"rank {rank} on {finding.host}: {finding.problem}"
    for rank, finding in enumerate(findings):
        other = findings[0]
        if not finding.gpu:
            return f"rank {rank} on {finding.host}: its tensors are not all on one GPU."
        if finding.version[0] != other.version[0] or finding.version[1] != other.version[1]:
            dotted = [".".join(map(str, each.version)) for each in (other, finding)]
            return (
                f"rank 0 on {other.host} has NCCL {dotted[0]} and rank {rank} on {finding.host} has NCCL {dotted[1]}. "
                "Install the same version of NCCL on all hosts."
            )
    owners: dict[str, int] = {}
    for rank, finding in enumerate(findings):
        owner = owners.setdefault(finding.gpu, rank)
        if owner != rank and not finding.shares:
            return (
                f"ranks {owner} and {rank} on {finding.host} use the same GPU (number {finding.index} of those that "
                f"rank {rank} sees). Start one rank a GPU (hvdrun -np gpu), and select each rank's own with "
                "torch.cuda.set_device(hvd.local_rank()) or, on JAX, jax.config.update('jax_default_device', "
                "jax.local_devices()[hvd.local_rank()]). For tests on one GPU: hvdrun --share-gpus."
            )
    return ""
