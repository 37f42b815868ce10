"""The placement group of the workers: given, or made here and removed again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.errors import LaunchError, LaunchTimeoutError
from hvdkit.optional_import import optional_import
from hvdkit_ray.settings import Demand

ray = optional_import("ray")
groups = optional_import("ray.util.placement_group")


@dataclass(frozen=True)
class Reservation:
    """The placement group of the workers. bundles: index for each worker; -1 for any. owned: was it made here?"""

    group: Any
    bundles: tuple[int, ...]
    owned: bool

    def release(self) -> None:
        """Remove the group if it was made here; harmless if it is gone."""
        if self.owned and ray.is_initialized():
            with contextlib.suppress(Exception):  # Ray itself may be down
                groups.remove_placement_group(self.group)

    def describe(self, worker: int) -> str:
        """Name a worker with its bundle, with a note if the bundle is on no node."""
        bundle = self.bundles[worker]
        if bundle < 0:
            return f"worker {worker} (any bundle)"
        node = groups.placement_group_table(self.group).get("bundles_to_node_id", {}).get(bundle, "")
        return f"worker {worker} (bundle {bundle}{'' if node else ', which is on no node'})"


def reserve(demand: Demand, given: Any, timeout_s: float) -> Reservation:
    """Reserve resources for all workers.

    given: the placement group to use; None to make one.
    Raises LaunchError if the group is too small, LaunchTimeoutError if Ray has not placed it in time; a group that was
    made here is removed then.
    """
    if given is not None:
        if not isinstance(given, groups.PlacementGroup):
            raise LaunchError(
                f"placement_group is a {type(given).__name__}. Make it with ray.util.placement_group(), or leave it "
                "out for a group of the job's own.",
                code="ray-placement-group-invalid",
            )
        check_room(given.bundle_specs, demand)
        # Others may use a share of a bundle: Ray knows.
        reservation = Reservation(given, (-1,) * demand.workers, owned=False)
    else:
        group = groups.placement_group(demand.bundles, strategy=demand.strategy)
        reservation = Reservation(group, tuple(map(demand.place, range(demand.workers))), owned=True)
    try:
        if not reservation.group.wait(math.ceil(timeout_s)):  # Ray counts whole seconds
            raise LaunchTimeoutError(_describe_shortage(reservation.group, demand, timeout_s), code="ray-no-room")
    except BaseException:
        reservation.release()
        raise
    return reservation


def check_room(bundles: Sequence[Mapping[str, float]], demand: Demand) -> None:
    """Raise LaunchError if the workers do not fit in a given placement group. bundles: its resources."""
    room = sum(map(demand.count_room, bundles))
    if room < demand.workers:
        raise LaunchError(
            f"The placement group has the bundles {list(map(dict, bundles))}, with room for {room} of "
            f"{demand.workers} workers of {demand.worker}. Make it larger, or pass use_current_placement_group=False "
            "for a group of their own.",
            code="ray-placement-group-too-small",
        )


def _describe_shortage(group: Any, demand: Demand, timeout_s: float) -> str:
    table = groups.placement_group_table(group)
    nodes = table.get("bundles_to_node_id", {})
    bundles = group.bundle_specs
    missing = [at for at in range(len(bundles)) if not nodes.get(at)]
    there = [_describe_node(node) for node in ray.nodes() if node["Alive"]]
    free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
    return (
        f"Ray has not placed the workers within {timeout_s:g} s: bundles {missing or 'none'} of "
        f"{len(bundles)} x {bundles[0]} ({table.get('strategy') or demand.strategy}) are on no node. Nodes: "
        f"{', '.join(there) or 'none'}; free in all: {free or 'nothing'}. Ask for fewer or smaller workers, add nodes, "
        "or raise placement_group_timeout_s."
    )


def _describe_node(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerAddress']} { {name: node['Resources'].get(name, 0) for name in ('CPU', 'GPU')} }"
