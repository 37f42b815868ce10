"""CRC-32C of many short records at once, by numpy; TensorBoard's bytewise CRC is half of an event's cost.

A CRC is linear: a record's CRC is the xor of the contributions of its bytes, each of which depends on the byte and on
the number of bytes after it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_POLYNOMIAL = np.uint32(0x82F63B78)  # Castagnoli's, reversed
_BLOCK = 64  # lengths of a table grow by this number at once


def masked_crcs(records: Sequence[bytes]) -> Words:
    """Return the CRC of each record, (n,), masked as in TFRecord files. records: of at least 4 bytes each."""
    lengths = np.array([len(record) for record in records])
    ends = lengths.cumsum()
    starts = ends - lengths
    data = np.frombuffer(b"".join(records), np.uint8).copy()
    data[starts[:, np.newaxis] + np.arange(4)] ^= 0xFF  # a CRC is initialized with ones
    following = np.repeat(ends, lengths) - 1 - np.arange(ends[-1])
    table = _make_table(-(-int(lengths.max()) // _BLOCK))
    crcs = ~np.bitwise_xor.reduceat(table[following, data], starts)
    return (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(0xA282EAD8)


@functools.lru_cache(maxsize=2)
def _make_table(blocks: int) -> Words:
    """Return a byte's contribution, (64 * blocks, 256), by the number of bytes after it."""
    table = np.empty((blocks * _BLOCK, 256), np.uint32)
    row = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = row >> np.uint32(1) ^ _POLYNOMIAL * (row & np.uint32(1))
    table[0] = row
    for at in range(1, len(table)):
        table[at] = row[table[at - 1] & 255] ^ table[at - 1] >> np.uint32(8)
    return table
