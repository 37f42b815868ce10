"""The axes of a search: values of each setting, and keys of settings that make no difference to a plan."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.config import Config
from hvdkit.engine.planned.settings import PlanSettings
from hvdkit.setting import MIB

_KIB = 1024
#: Setting -> its values, rising, unless it is UNORDERED. Those of "algorithm" depend on the plan.
VALUES: Mapping[str, tuple[Any, ...]] = {
    "algorithm": ("auto",),
    "fusion_bytes": (256 * _KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
    "progress": ("inline", "thread"),
    "buckets_in_flight": (2, 4, 8),
    "chunk_bytes": (128 * _KIB, 512 * _KIB, 2 * MIB),
}
UNORDERED = ("algorithm",)
_SHARING = ("shared_memory", "hierarchical")  # transports that have chunks


@dataclass(frozen=True)
class Shape:
    """The size of a plan, which decides what settings matter.

    nbytes: of its tensors. sharers: ranks of the host that has most. shards: see Transport; what is cut into chunks.
    """

    nbytes: int
    transport: str
    sharers: int
    shards: int

    def same(self, settings: PlanSettings) -> Hashable:
        """A key that is equal for settings between which this plan does not differ."""
        bucket = min(settings.fusion_bytes or self.nbytes, self.nbytes)
        depth = min(settings.buckets_in_flight, -(-self.nbytes // max(1, bucket)))
        chunk = min(settings.chunk_bytes, -(-bucket // self.shards)) if self.transport in _SHARING else 0
        return bucket, depth, chunk, settings.progress, settings.algorithm

    def shared_bytes(self, settings: PlanSettings) -> int:
        """Approximate bytes of shared memory that a host needs for the plan."""
        bucket = min(settings.fusion_bytes or self.nbytes, self.nbytes)
        return self.sharers * bucket * settings.buckets_in_flight if self.transport in _SHARING else 0


def fixed_fields(config: Config) -> list[str]:
    """Names of settings that the user has changed from their defaults; they are not searched."""
    default = Config()
    return [name for name in VALUES if getattr(config, name) != getattr(default, name)]


def plan_axes(first: PlanSettings, config: Config, algorithms: Sequence[str] = ()) -> dict[str, list[Any]]:
    """The axes of a search that begins at `first`. algorithms: between hosts, that are worth trying."""
    fixed = fixed_fields(config)
    axes = {**VALUES, "algorithm": algorithms}
    return {name: sorted({*values, getattr(first, name)}) for name, values in axes.items() if name not in fixed}
