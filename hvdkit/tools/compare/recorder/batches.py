"""A batch of a loader: its rows, and the batches of several ranks joined to one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the tensors and arrays of nested tuples, lists and dicts."""
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from leaves(value)


def count_rows(batch: Any) -> int:
    """Return the first dimension of the first tensor that has one; 0 without."""
    return next((len(leaf) for leaf in leaves(batch) if len(leaf.shape)), 0)


def hash_rows(batch: Any) -> list[str]:
    """Hash each row."""
    rows = count_rows(batch)
    parts = [np.ascontiguousarray(_to_numpy(leaf)) for leaf in leaves(batch) if len(leaf.shape) and len(leaf) == rows]
    names = []
    for row in range(rows):
        name = blake2b(digest_size=8)
        for part in parts:
            name.update(part[row].tobytes())
        names.append(name.hexdigest())
    return names


def copy(batch: Any) -> Any:
    """Copy a batch to CPU memory. Raises TypeError for what is neither a tensor nor a plain value."""
    if hasattr(batch, "detach"):
        return batch.detach().cpu().clone()
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        return np.array(batch)
    if isinstance(batch, Mapping):
        return {key: copy(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(copy, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(copy, batch))
    if batch is None or isinstance(batch, (str, bytes, int, float, bool)):
        return batch
    raise TypeError(
        f"hvdkit compare: a batch holds a {type(batch).__name__}. Batches may hold tensors, numpy arrays, numbers, "
        f"strings, dicts, lists and tuples only."
    )


def join(batches: Sequence[Any]) -> Any:
    """Join batches of the same structure to one, with their rows in order."""
    first = batches[0]
    if hasattr(first, "detach"):
        import torch

        return torch.cat(list(batches)) if first.dim() else first
    if hasattr(first, "shape") and hasattr(first, "dtype"):
        return np.concatenate(batches) if first.ndim else first
    if isinstance(first, Mapping):
        return {key: join([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(join, zip(*batches, strict=True)))
    if isinstance(first, (list, tuple)) and all(isinstance(one, (str, bytes, int, float)) for one in first):
        return type(first)(one for batch in batches for one in batch)
    if isinstance(first, (list, tuple)):
        return type(first)(map(join, zip(*batches, strict=True)))
    return first


def _to_numpy(leaf: Any) -> Any:
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        leaf = leaf.float() if str(leaf.dtype) == "torch.bfloat16" else leaf
    return np.asarray(leaf)
