"""Decides, from the findings of all ranks, whether they reduce tensors in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The device of a rank, and the library that would reduce its tensors.

    problem: why the rank cannot use the library; "" if it can.
    host: name of its host.
    device: a text that is the same for all users of the device only; "" if the rank's tensors are not on one device.
    name: the device as the process sees it, for example "GPU 0".
    library: for example "NCCL".
    version: of the library; () if unknown.
    shares: the rank may share its device.
    """

    problem: str = ""
    host: str = ""
    device: str = ""
    name: str = ""
    library: str = ""
    version: tuple[int, ...] = ()
    shares: bool = False


def find_problem(findings: Sequence[Finding]) -> str:
    """Describe why these ranks cannot reduce together, and the cure; "" if they can. The same on all ranks."""
    for rank, finding in enumerate(findings):
        if finding.problem:
            return f"rank {rank} on {finding.host}: {finding.problem}"
    first = findings[0]
    for rank, finding in enumerate(findings):
        if not finding.device:
            return f"rank {rank} on {finding.host}: its tensors are not all on one GPU."
        if finding.library != first.library or finding.version[:2] != first.version[:2]:
            names = [f"{each.library} {'.'.join(map(str, each.version))}".strip() for each in (first, finding)]
            return (
                f"rank 0 on {first.host} has {names[0]} and rank {rank} on {finding.host} has {names[1]}. "
                f"Install the same version of {first.library} on all hosts."
            )
    owners: dict[str, int] = {}
    for rank, finding in enumerate(findings):
        owner = owners.setdefault(finding.device, rank)
        if owner != rank and not finding.shares:
            return (
                f"ranks {owner} and {rank} on {finding.host} use the same device ({finding.name} of those that rank "
                f"{rank} sees). Start one rank a GPU (hvdrun -np gpu), and select each rank's own with "
                "torch.cuda.set_device(hvd.local_rank()) or, on JAX, jax.config.update('jax_default_device', "
                "jax.local_devices()[hvd.local_rank()]). For tests on one GPU: hvdrun --share-gpus."
            )
    return ""
