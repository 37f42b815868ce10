"""Decides, from what every rank has found, whether the ranks reduce tensors in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The device and backend of a rank.

    problem: why the rank cannot use torch's process groups; "" if it can.
    host: name of its host.
    device: the device's identity, see accelerator.identify(); "" if its tensors are not on one device.
    name: torch's name of the device.
    backend: name of the backend.
    version: of the backend's library, () if unknown.
    shares: the rank may share its device.
    """

    problem: str = ""
    host: str = ""
    device: str = ""
    name: str = ""
    backend: str = ""
    version: tuple[int, ...] = ()
    shares: bool = False


def find_problem(findings: Sequence[Finding], wish: str) -> str:
    """Describe why these ranks cannot use a process group together, and the cure; "" if they can. Equal on all ranks.

    wish: the setting device_transport.
    """
    for rank, finding in enumerate(findings):
        if finding.problem:
            return f"rank {rank} on {finding.host}: {finding.problem}."
    first = findings[0]
    for rank, finding in enumerate(findings):
        here = f"rank {rank} on {finding.host}"
        if not finding.device:
            return f"{here}: its tensors are not all on one device."
        if finding.backend != first.backend:
            return (
                f"rank 0 on {first.host} has tensors on {first.name} for {first.backend} and {here} on {finding.name} "
                f"for {finding.backend}. Put the tensors of all ranks on the same type of device."
            )
        if finding.version[:2] != first.version[:2]:
            dotted = [".".join(map(str, each.version)) for each in (first, finding)]
            library = first.backend.upper()
            return (
                f"rank 0 on {first.host} has {library} {dotted[0]} and {here} has {library} {dotted[1]}. Install the "
                f"same version of {library} on all hosts."
            )
        if wish == "nccl" and finding.backend != "nccl":
            return f"{here} has tensors on {finding.name}, which {finding.backend.upper()} reduces and not NCCL."
    owners: dict[str, int] = {}
    for rank, finding in enumerate(findings):
        owner = owners.setdefault(finding.device, rank)
        if owner != rank and not finding.shares:
            return (
                f"ranks {owner} and {rank} on {finding.host} use the same GPU ({finding.name} of those that rank "
                f"{rank} sees). Start one rank a GPU (hvdrun -np gpu), and select each rank's own with "
                "torch.cuda.set_device(hvd.local_rank()). For tests on one GPU: hvdrun --share-gpus."
            )
    return ""
