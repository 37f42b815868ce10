"""Assignment of ranks to coordinates in a mesh of pipeline stages, replicas and tensor-parallel ranks.

Tensor parallelism sends activations several times per layer, so its groups lie inside hosts. Replicas come next. Stages
send the least, one activation per micro-batch, so they lie between hosts: the order of Megatron-LM (Narayanan et
al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdkit.errors import ParallelError

#: Axes from the outermost, between hosts, to the innermost.
AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Placement:
    """The ranks of a mesh. ranks: (pp, dp, tp), the number in the world of the rank at each coordinate."""

    ranks: npt.NDArray[np.int64]

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return int(self.ranks.shape[_number(axis)])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank, from 0 along each axis."""
        (place,) = np.argwhere(self.ranks == rank)
        return dict(zip(AXES, place.tolist(), strict=True))

    def groups(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ in this coordinate only, each in the order of the coordinate."""
        rows: list[list[int]] = np.moveaxis(self.ranks, _number(axis), -1).reshape(-1, self.size(axis)).tolist()
        return rows

    def group(self, axis: str, rank: int) -> list[int]:
        """Return the group of this axis that contains a rank."""
        return next(ranks for ranks in self.groups(axis) if rank in ranks)


def complete_mesh_sizes(world: int, dp: int | None, tp: int, pp: int) -> tuple[int, int, int]:
    """Check the sizes of a mesh against the number of ranks; returns (dp, tp, pp).

    world: number of ranks.
    dp: number of replicas; None for as many as the ranks allow.
    tp: number of tensor-parallel ranks.
    pp: number of stages.

    Raises ParallelError if the product is not `world`.
    """
    given = {"dp": dp, "tp": tp, "pp": pp}
    for axis, size in given.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ParallelError(f"Mesh({axis}={size!r}): a size must be an integer of 1 or more.")
    called = f"Mesh({', '.join(f'{axis}={size}' for axis, size in given.items() if size is not None)})"
    product = tp * pp * (dp or 1)
    if world % product or (dp is not None and product != world):
        needed = f"a multiple of {product}" if dp is None else str(product)
        raise ParallelError(
            f"{called} needs {needed} ranks, but the world has {world}. "
            f"Start the job with {needed} ranks, or take {_suggest(world, tp, pp)}."
        )
    return world // (tp * pp), tp, pp


def _suggest(world: int, tp: int, pp: int) -> str:
    """Suggest a possible mesh whose axes are as close to the requested sizes as the world allows."""
    near_tp = max(size for size in range(1, min(tp, world) + 1) if world % size == 0)
    rest = world // near_tp
    near_pp = max(size for size in range(1, min(pp, rest) + 1) if rest % size == 0)
    return f"Mesh(dp={rest // near_pp}, tp={near_tp}, pp={near_pp})"


def place(hosts: Sequence[str], dp: int, tp: int, pp: int) -> Placement:
    """Assign the ranks of a world to coordinates.

    hosts: host of each rank, by rank; dp * tp * pp of them.
    dp: number of replicas.
    tp: number of tensor-parallel ranks.
    pp: number of stages.

    As many tp groups as possible lie inside a host; only the remaining ranks of several hosts form a group together.
    """
    members = {host: [rank for rank, each in enumerate(hosts) if each == host] for host in dict.fromkeys(hosts)}
    whole = {host: len(ranks) // tp * tp for host, ranks in members.items()}
    inside = [rank for host, ranks in members.items() for rank in ranks[: whole[host]]]
    left = [rank for host, ranks in members.items() for rank in ranks[whole[host] :]]
    return Placement(np.array(inside + left, np.int64).reshape(pp, dp, tp))


def describe_slow_tensor_parallelism(placement: Placement, hosts: Sequence[str]) -> str:
    """Describe the cost of tp groups that span several hosts; "" if none does."""
    across = [ranks for ranks in placement.groups("tp") if len({hosts[rank] for rank in ranks}) > 1]
    if not across:
        return ""
    tp = placement.size("tp")
    slots = min(hosts.count(host) for host in set(hosts))
    fits = max(size for size in range(1, min(tp, slots) + 1) if tp % size == 0 and slots % size == 0)
    # A ring moves 2 (n - 1) / n of the data; 4 allreduces per layer (Megatron-LM, 2 forward and 2 backward).
    sent = 4 * 2 * (tp - 1) / tp
    return (
        f"tp={tp} spans hosts: {len(across)} of {len(placement.groups('tp'))} tensor-parallel groups lie on several, "
        f"such as the ranks {across[0]} on {', '.join(dict.fromkeys(hosts[rank] for rank in across[0]))}. In each "
        f"step every transformer layer then sends {sent:.3g} times the bytes of its activations over the network, not "
        f"overlapped with computing: for 4096 tokens of width 4096 in bfloat16 that is {sent * 32:.0f} MiB, "
        f"{sent * 33.6 / 12.5:.0f} ms a layer at 100 Gbit/s. The hosts have {slots} or more ranks: use tp={fits}"
        f"{', and pp for the rest' if fits < tp else ''}."
    )


def _number(axis: str) -> int:
    if axis not in AXES:
        raise ParallelError(f"The mesh has no axis {axis!r}; it has dp, tp and pp.")
    return AXES.index(axis)
