"""Used masks in a GPU's memory: see UsedMasks. The host waits for the GPU only if a tensor is missing on this rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hvdkit.engine.planned.plan import Bucket
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.tensors import as_tensor
from hvdkit.transport.buffer import Buffer


class DeviceMasks:
    """See Masks.

    memory: one buffer per bucket, (bucket.count,), on the GPU. static: the same tensors are missing in every round, so
    the masks are read in the first round only.
    """

    def __init__(self, buckets: Sequence[Bucket], memory: Sequence[Buffer], *, static: bool) -> None:
        self._buckets, self._static = buckets, static
        self._masks = [
            as_tensor(whole.slice(bucket.data_count, bucket.count))
            for bucket, whole in zip(buckets, memory, strict=True)
        ]
        self._ones = [torch.ones_like(mask) for mask in self._masks]
        self._locally_unused: dict[int, frozenset[int]] = {}  # bucket -> tensors, between mark() and globally_unused()
        self._first: dict[int, tuple[frozenset[int], frozenset[int]]] = {}  # bucket -> first unused: here, on all ranks

    def mark(self, bucket: int, locally_unused: frozenset[int]) -> None:
        """See Masks.mark. Raises HorovodInternalError if the missing tensors differ from those of the first round."""
        first = self._first.get(bucket)
        if first is not None and first[0] != locally_unused:
            raise HorovodInternalError(
                "static_graph=True, but this step uses other parameters than the first one: "
                f"{len(first[0] ^ locally_unused)} parameters of a bucket differ. Leave out static_graph."
            )
        mask = self._masks[bucket]
        mask.copy_(self._ones[bucket])
        self._locally_unused[bucket] = locally_unused
        for position, slot in enumerate(self._buckets[bucket].slots):
            if slot.tensor in locally_unused:
                mask[position].zero_()

    def globally_unused(self, bucket: int) -> Collection[int]:
        """See Masks.globally_unused."""
        here = self._locally_unused.pop(bucket)
        if bucket in self._first:
            return self._first[bucket][1]
        everywhere: frozenset[int] = frozenset()
        if here:
            marks = zip(self._buckets[bucket].slots, self._masks[bucket].tolist(), strict=False)
            everywhere = frozenset(slot.tensor for slot, mark in marks if not mark)
        if self._static:
            self._first[bucket] = (here, everywhere)
        return everywhere

    def anyone_trains(self, bucket: int) -> bool:
        """See Masks.anyone_trains."""
        return bool(self._masks[bucket][-1].item() > 0)
