"""Updates as integers whose sum modulo 2**32 or 2**64 is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit_federated.errors import FederatedError
from hvdkit_federated.vector import Vector

#: uint32 or uint64; sums wrap.
Words = NDArray[Any]


@dataclass(frozen=True)
class Quantiser:
    """Encodes updates as integers: each number is a multiple of `step`, times the sample count.

    step: the distance of two values. half: the largest multiple. bits: width of a word.
    A negative number is its two's complement. The number of samples is the first word.
    """

    step: float
    half: int
    bits: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the words."""
        return np.dtype(f"u{self.bits // 8}")

    def encode(self, update: Vector, count: int, *, shrink: bool = False) -> Words:
        """Encode count times the update (n,), with count itself: (n + 1,). Rounds to the nearest multiple.

        shrink: round towards zero, so that no norm grows. Raises FederatedError for a number out of range.
        """
        steps = update / self.step
        steps = np.trunc(steps) if shrink else np.rint(steps)
        if update.size and np.abs(steps).max() > self.half:
            raise FederatedError(
                f"its update has a number beyond +-{self.step * self.half:g}, which is the clip of SecureAggregation. "
                "Pass a larger clip, or train with a smaller learning rate or fewer local epochs"
            )
        whole = np.concatenate([[1], steps.astype(np.int64)]) * np.int64(count)
        return whole.astype(np.uint64).astype(self.dtype)

    def decode(self, total: Words) -> tuple[Vector, int]:
        """Decode a sum of encoded updates, (n + 1,): the sum of count * update (n,), and the sum of counts."""
        whole = total.view(f"i{self.bits // 8}")
        return whole[1:].astype(np.float64) * self.step, int(whole[0])


def make_quantiser(clip: float, levels: int, most_samples: int, clients: int) -> Quantiser:
    """Make the quantiser with the shortest words in which no sum of this number of clients can overflow.

    clip: the largest number of an update.
    levels: number of values from -clip to clip.
    most_samples: the largest sample count of a client.
    clients: number of clients.
    """
    half = levels // 2
    largest = half * most_samples * clients
    for bits in (32, 64):
        if largest < 1 << (bits - 1):
            return Quantiser(clip / half, half, bits)
    raise FederatedError(
        f"SecureAggregation: {levels} levels times {most_samples} samples times {clients} clients is more than 2**64, "
        "so sums could overflow. Use fewer levels, or a smaller most_samples."
    )
