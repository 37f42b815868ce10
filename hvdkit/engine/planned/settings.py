"""The settings of a plan: how it is divided into buckets and driven. Results do not depend on them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from hvdkit.config import Config
from hvdkit.transport.buckets import CHUNK_BYTES

#: Default bucket size on a GPU: NCCL needs large buckets, and its operations cost the host more.
_DEVICE_FUSION_BYTES = 25 * 2**20


@dataclass(frozen=True)
class PlanSettings:
    """The settings of a plan; see the fields of Config. Equal on all ranks of a plan, except for `progress`."""

    fusion_bytes: int
    buckets_in_flight: int
    chunk_bytes: int = CHUNK_BYTES
    progress: str = "inline"
    algorithm: str = "auto"

    def threaded(self, spare_core: bool) -> bool:
        """Does a thread drive the buckets? spare_core: see has_spare_core, for the setting "auto"."""
        return self.progress == "thread" or (self.progress == "auto" and spare_core)

    def __str__(self) -> str:
        return (
            f"buckets of {format_bytes(self.fusion_bytes)}, {self.buckets_in_flight} in flight, chunks of "
            f"{format_bytes(self.chunk_bytes)}, progress {self.progress}, algorithm {self.algorithm}"
        )


def settings_of(config: Config) -> PlanSettings:
    """Return the settings of plans in the user's configuration."""
    return PlanSettings(**{field.name: getattr(config, field.name) for field in fields(PlanSettings)})


def device_plan_settings(config: Config) -> PlanSettings:
    """Return the settings of plans in GPU memory in the user's configuration."""
    settings, default = settings_of(config), Config().fusion_bytes
    size = _DEVICE_FUSION_BYTES if settings.fusion_bytes == default else settings.fusion_bytes
    return replace(settings, fusion_bytes=size, progress="inline")


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes: "4 MiB", "512 KiB", "100 bytes"."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} bytes"
