"""The reductions that torch's process groups do, and tensors as these groups take them."""

from __future__ import annotations

import torch

from hvdkit.transport.buffer import COMPLEX, FLOATS

_INTEGERS = frozenset({"int8", "uint8", "int32", "int64"})
#: Names of the dtypes whose numbers the backends add; complex ones as pairs of real numbers.
REDUCIBLE = FLOATS | COMPLEX | _INTEGERS
#: A bool is a byte of 0 or 1: op on bools -> op on bytes.
OF_BOOLS = {"sum": "max", "max": "max", "product": "min", "min": "min"}


def can_reduce(dtype: str, op: str, *, scaled: bool) -> bool:
    """Return whether a process group can do this reduction. op: an Op, "average" or "adasum". scaled: with a factor.

    It cannot reduce int16, uint16 and float8; it has no averages and factors of integers, no factors of min, max and
    product, and no complex products.
    """
    if dtype == "bool":
        return op in OF_BOOLS and not scaled
    if op in ("sum", "average"):
        return dtype in FLOATS or dtype in COMPLEX or (dtype in _INTEGERS and op == "sum" and not scaled)
    return op in OF_BOOLS and not scaled and dtype in FLOATS | _INTEGERS


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as numbers that the backends reduce: bools as bytes, complex numbers as pairs."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
