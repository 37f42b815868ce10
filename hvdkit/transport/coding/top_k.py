"""The coding TopK, which sends only the largest numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdkit.transport.buffer import Array
from hvdkit.transport.coding.api import Matrix
from hvdkit.transport.coding.coders import Bytes, GatheredCoder, GatheredCoding


@dataclass(frozen=True)
class TopK(GatheredCoding):
    """Send only the values of a bucket that are largest in magnitude, each with its index.

    ratio: the fraction of the values that is sent, above 0 and at most 1; 0.01 sends a fiftieth of the bytes.
    The values that are not sent are added to the next step (Stich et al., "Sparsified SGD with Memory", 2018). Use it
    for gradients of which most values are nearly zero, such as those of an embedding. Methods: see Coding.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(
                f"TopK({self.ratio!r}): ratio is the part of the values that is sent; it must be above 0 and at most 1."
            )

    def open(self, count: int, exact: int, dtype: str, matrices: Sequence[Matrix] = ()) -> TopKCoder:
        return TopKCoder(count, exact, dtype, max(1, round(self.ratio * count)))


class TopKCoder(GatheredCoder):
    """Writes messages of the indices of the k largest numbers as int32, then these numbers as float32."""

    def __init__(self, count: int, exact: int, dtype: str, k: int) -> None:
        super().__init__(count, exact, dtype, 8 * k)
        self._k = k

    def encode(self, values: Array) -> Bytes:
        magnitudes = np.abs(values)
        # NaN counts as the largest and is sent first, so that all ranks get it, as without coding.
        magnitudes[np.isnan(magnitudes)] = np.inf
        places = np.argpartition(magnitudes, self.count - self._k)[self.count - self._k :].astype(np.int32)
        places.sort()
        return np.concatenate([places.view(np.uint8), values[places].astype(np.float32).view(np.uint8)])

    def add(self, total: Array, message: Bytes, sign: int) -> None:
        places = message[: 4 * self._k].copy().view(np.int32)
        total[places] += sign * message[4 * self._k :].copy().view(np.float32)
