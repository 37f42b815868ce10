"""torch tensors as buffers, and torch's arithmetic for the narrow types that are slow in numpy."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.buffer import FLOAT8, HALF, STORAGE, Buffer, Op

_CHUNK = 64 * 1024  # elements: 256 KiB of float32, which stays in cache

#: dtype -> name, of the sendable dtypes that this torch has.
NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in STORAGE if hasattr(torch, name)}
#: A number with at least these bits, without the sign, is inf or nan.
_INF_BITS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
#: A dtype that numpy lacks is viewed as integers of its width.
_BITS = {"bfloat16": torch.uint16, **dict.fromkeys(FLOAT8, torch.uint8)}


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return the name of a sendable dtype; TypeError for another one."""
    try:
        return NAMES[dtype]
    except KeyError:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"hvdkit.torch takes torch tensors; the dtype of this argument is {dtype!r}.") from None
        raise TypeError(
            f"{dtype} cannot be sent between ranks. Cast the tensor to one of {', '.join(NAMES.values())}."
        ) from None


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of the tensor's dtype; TypeError if it cannot be sent."""
    return name_of_dtype(tensor.dtype)


def as_array(tensor: torch.Tensor, name: str) -> NDArray[Any]:
    """View a contiguous CPU tensor (n,) as an array of STORAGE[name], sharing memory.

    Unlike Tensor.numpy() this leaves the tensor resizable: FSDP, among others, frees tensors by resizing them. Raises
    as numpy() does for a tensor that is not in the CPU's memory as it is, for example a conjugate.
    """
    plain = tensor.is_cpu and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    address = tensor.data_ptr() if plain and tensor.is_contiguous() else 0
    if not address:
        bits = _BITS.get(name)
        return (tensor if bits is None else tensor.view(bits)).numpy()
    # 0.9 us less than by numpy's array interface, of some 15 us for one of many small operations
    memory: Any = _bytes_type(tensor.nbytes).from_address(address)
    memory.tensor = tensor  # the array keeps `memory` alive, and so the tensor
    return np.frombuffer(memory, STORAGE[name])


@functools.lru_cache(1024)
def _bytes_type(count: int) -> Any:
    """Make ctypes' type of `count` bytes, which takes some 10 us for a new count."""
    return ctypes.c_char * count


def as_buffer(tensor: torch.Tensor) -> Buffer:
    """View a contiguous CPU tensor of any shape as a Buffer (n,), sharing memory."""
    name = name_of_dtype(tensor.dtype)
    flat = tensor.detach() if tensor.requires_grad else tensor
    if flat.dim() != 1:
        flat = flat.view(-1)
    return Buffer(as_array(flat, name), name)


@dataclass(slots=True, eq=False)
class TensorBuffer(Buffer):
    """A Buffer that is a contiguous tensor, on any device, for engines that take tensors. array: (n,)."""

    array: torch.Tensor  # type: ignore[assignment]

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.array.numel()

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.array.numel() * self.array.element_size()

    @property
    def pointer(self) -> int:
        return self.array.data_ptr()


def contiguous(tensor: torch.Tensor, *, copied: bool) -> torch.Tensor:
    """Return contiguous memory with the tensor's values on its device: its own, unless `copied` or not contiguous."""
    if copied:
        return tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def as_tensor(buffer: Buffer) -> torch.Tensor:
    """View a Buffer as a tensor (n,), sharing memory."""
    if isinstance(buffer, TensorBuffer):
        return buffer.array
    tensor = torch.from_numpy(buffer.array)
    return tensor.view(DTYPES[buffer.dtype]) if buffer.dtype in _BITS else tensor


class TorchArithmetic(NumpyArithmetic):
    """Arithmetic in numpy where it is fast; in torch, ten times as fast, for float16, bfloat16 and casts."""

    def combine(self, out: Buffer, sources: Sequence[Buffer], op: Op = "sum", scale: float = 1.0) -> None:
        if sources[0].dtype not in HALF or op != "sum":
            super().combine(out, sources, op, scale)
            return
        target, tensors = as_tensor(out), [as_tensor(source) for source in sources]
        total = torch.empty(min(_CHUNK, out.count), dtype=torch.float32)
        for start in range(0, out.count, _CHUNK):
            stop = min(start + _CHUNK, out.count)
            part = total[: stop - start].copy_(tensors[0][start:stop])
            for tensor in tensors[1:]:
                part.add_(tensor[start:stop])
            if scale != 1.0:
                part.div_(1 / scale) if 0 < abs(scale) < 1 else part.mul_(scale)
            target[start:stop].copy_(part)

    def cast(self, out: Buffer, source: Buffer, scale: float = 1.0) -> None:
        target, tensor = as_tensor(out), as_tensor(source)
        narrowing = out.array.itemsize < source.array.itemsize
        largest = torch.finfo(target.dtype).max
        for start in range(0, out.count, _CHUNK):
            part = tensor[start : start + _CHUNK]
            if scale != 1.0:
                part = part * scale
            made = target[start : start + _CHUNK].copy_(part)
            # Few gradients overflow: check the narrow result first, and correct it only if it has an inf.
            if narrowing and _has_inf(made):
                made.copy_(torch.where(torch.isinf(part), part, part.clamp(-largest, largest)))


def _has_inf(numbers: torch.Tensor) -> bool:
    """Return whether a number is inf or nan, by its 16 bits: isfinite() takes twenty times as long."""
    if numbers.element_size() != 2:
        return not torch.isfinite(numbers).all()
    magnitudes = numbers.view(torch.int16).numpy().view(np.uint16) & np.uint16(0x7FFF)
    return bool(magnitudes.max(initial=0) >= _INF_BITS[numbers.dtype])
