"""The memory of a sharded optimizer's buckets: in the host, or on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdkit.engine import runtime
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.on_device import OnDevice
from hvdkit.engine.planned.settings import PlanSettings, settings_of
from hvdkit.transport.buckets import Buckets, BucketSpec


@dataclass(frozen=True)
class BucketMemory:
    """The device and settings of a sharded optimizer's buckets.

    open_buckets: see Transport.open_buckets(). settings: of the plan; the same for gradients and parameters.
    device: of the buckets; None for the host.
    """

    open_buckets: Callable[[Sequence[BucketSpec], int | None], Buckets]
    settings: PlanSettings
    device: OnDevice | None = None


def memory_on_host(group: Group) -> BucketMemory:
    """Return the BucketMemory of buckets in the memory of the group's transport, with the user's settings."""
    settings = settings_of(runtime.runtime("A sharded optimizer").config)
    return BucketMemory(group.transport.open_buckets, settings)


def may_be_in_place(group: Group) -> bool:
    """Return whether each of the two phases supports in-place segments; see Buckets."""
    return group.transport.between is None
