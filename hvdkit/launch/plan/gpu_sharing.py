"""Whether ranks may share a GPU, by the options and settings of the job."""

from __future__ import annotations

import enum

from hvdkit.config import Config


class GpuSharing(enum.Enum):
    """What becomes of a job whose ranks would share GPUs. The value of a refusal: what asks for one GPU a rank."""

    ALLOWED = "allowed"
    WARNED = "warned"  # the default: a job on CPUs may have more ranks than its hosts have GPUs
    REFUSED_BY_NP = "-np gpu"
    REFUSED_BY_TRANSPORT = "device_transport=nccl"

    @property
    def is_refused(self) -> bool:
        """Is the job ended with an error?"""
        return self in (GpuSharing.REFUSED_BY_NP, GpuSharing.REFUSED_BY_TRANSPORT)


def choose_gpu_sharing(np: int | str | None, config: Config) -> GpuSharing:
    """Choose what becomes of a job whose ranks would share GPUs. np: see LaunchOptions."""
    if config.share_gpus or config.device_transport == "host":
        return GpuSharing.ALLOWED
    if np == "gpu":
        return GpuSharing.REFUSED_BY_NP
    return GpuSharing.REFUSED_BY_TRANSPORT if config.device_transport == "nccl" else GpuSharing.WARNED
