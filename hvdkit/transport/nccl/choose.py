"""Do these ranks reduce in device memory? What each of them says, and what all of them conclude from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hvdkit.transport.api import Transport
from hvdkit.transport.cuda import CudaDevice
from hvdkit.transport.nccl.library import Library, Version
from hvdkit.transport.small_collectives import gather_bytes


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

    def encode(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> Finding:
        """What encode() has made."""
        fields = json.loads(encoded)
        return cls(**{**fields, "version": tuple(fields["version"])})


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


def gather_findings(transport: Transport, finding: Finding) -> list[Finding]:
    """All ranks' findings; collective."""
    return [Finding.decode(each) for each in gather_bytes(transport, finding.encode())]


def describe(device: CudaDevice, library: Library, host: str, *, shares: bool) -> Finding:
    """The finding of a rank whose tensors are on this device."""
    return Finding("", host, device.uuid, device.index, library.version, shares)
