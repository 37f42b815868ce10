"""Conversion of torch.distributed's arguments to buffers and operations of a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed import ReduceOp

from hvdkit.torch.tensors import as_buffer
from hvdkit.transport.arithmetic import check_reduction
from hvdkit.transport.buffer import SCALED, Buffer, Op

_OPS: dict[object, Op] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "sum",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "product",
}
_BITWISE: dict[object, Callable[..., torch.Tensor]] = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


class Reduction:
    """A ReduceOp for numbers of a dtype over `size` ranks.

    op, scale: for a transport. bitwise: replaces them for BAND, BOR and BXOR; else None.
    Raises TypeError for a dtype without this reduction, ValueError for an unknown ReduceOp.
    """

    def __init__(self, reduce_op: ReduceOp, dtype: str, size: int, call: str) -> None:
        kind = getattr(reduce_op, "op", reduce_op)
        self.bitwise = _BITWISE.get(kind)
        if self.bitwise is None and kind not in _OPS:
            raise ValueError(
                f"{call}: {reduce_op} is not supported by the hvdkit backend. Use SUM, AVG, MIN, MAX, PRODUCT, BAND, "
                "BOR or BXOR; instead of PREMUL_SUM multiply the tensor before."
            )
        self.op: Op = _OPS.get(kind, "sum")
        self.scale = 1.0 / size if kind == ReduceOp.AVG else 1.0
        if self.bitwise is None:
            check_reduction(dtype, self.op, call)
        if kind == ReduceOp.AVG and dtype not in SCALED:
            raise TypeError(f"{call}: AVG of {dtype} is not supported, as it would be cut off. Use SUM, and divide.")


class Memory:
    """Contiguous memory for a tensor of a collective: the tensor's own, if that is contiguous.

    filled: it is an output, and `finish` copies it back. Raises TypeError for a tensor that cannot be sent.
    """

    def __init__(self, tensor: torch.Tensor, call: str, *, filled: bool = False) -> None:
        if tensor.device.type != "cpu":
            raise TypeError(
                f"{call}: the tensor is on {tensor.device}, and the hvdkit backend of torch.distributed moves CPU "
                f'tensors. For these use init_process_group("nccl"), under hvdrun too, or move the tensor to the CPU.'
            )
        if tensor.layout is not torch.strided:
            raise TypeError(f"{call}: tensors of layout {tensor.layout} are not supported. Pass tensor.to_dense().")
        self.tensor, self.flat = tensor, tensor
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            self.flat = tensor.detach().contiguous().resolve_conj().resolve_neg()
        self._filled = filled
        self.buffer = as_buffer(self.flat)

    def finish(self) -> None:
        """Copy the received memory to the tensor."""
        if self._filled and self.flat is not self.tensor:
            self.tensor.detach().copy_(self.flat)


def finish_all(memories: Sequence[Memory]) -> None:
    """See Memory.finish."""
    for memory in memories:
        memory.finish()


def divide_evenly(buffer: Buffer, size: int, count: int, call: str) -> list[Buffer]:
    """Divide `buffer` (size * count,) into a buffer (count,) per rank. ValueError for another number of elements."""
    if buffer.count != size * count:
        raise ValueError(
            f"{call}: {buffer.count} elements cannot be {size} pieces of {count}, one for each of the {size} ranks."
        )
    return [buffer.slice(rank * count, (rank + 1) * count) for rank in range(size)]


def divide_rows(tensor: torch.Tensor, buffer: Buffer, splits: Sequence[int], size: int, call: str) -> list[Buffer]:
    """Divide the tensor's rows into a buffer per rank. splits: rows of each; equal numbers if empty.

    Raises ValueError for splits that do not fit.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"{call}: {rows} rows cannot be divided by {size} ranks. Pass split sizes.")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(f"{call}: the split sizes {list(splits)} do not fit {rows} rows and {size} ranks.")
    width = buffer.count // rows if rows else 0
    pieces, at = [], 0
    for split in splits:
        pieces.append(buffer.slice(at, at + split * width))
        at += split * width
    return pieces


def check_alike(buffers: Sequence[Buffer], call: str) -> None:
    """Raise TypeError for buffers of different dtypes."""
    names = sorted({buffer.dtype for buffer in buffers})
    if len(names) > 1:
        raise TypeError(f"{call}: the tensors have the dtypes {', '.join(names)}. Pass tensors of one dtype.")
