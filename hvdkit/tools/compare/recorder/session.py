"""The recording of this process, for all frameworks, with the batches of its loaders."""

from __future__ import annotations

import atexit
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.tools.compare.records import RankRecord, read_records, write_record


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
    """Return the first dimension of the first tensor that has one; 0 if none has."""
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
    """Copy a batch to CPU memory. Raises TypeError for values that are neither tensors nor plain values."""
    return join([batch])


def join(batches: Sequence[Any]) -> Any:
    """Join batches of the same structure to one in CPU memory, with their rows in order. Raises TypeError as copy()."""
    first = batches[0]
    if hasattr(first, "detach"):
        import torch

        tensors = [batch.detach().cpu() for batch in batches]
        return torch.cat(tensors) if first.dim() else tensors[0].clone()
    if hasattr(first, "shape") and hasattr(first, "dtype"):
        arrays = [np.array(batch) for batch in batches]
        return np.concatenate(arrays) if arrays[0].ndim else arrays[0]
    if isinstance(first, Mapping):
        return {key: join([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(join, zip(*batches, strict=True)))
    if isinstance(first, (list, tuple)) and all(isinstance(one, (str, bytes, int, float)) for one in first):
        return type(first)(one for batch in batches for one in batch)
    if isinstance(first, (list, tuple)):
        return type(first)(map(join, zip(*batches, strict=True)))
    if first is None or isinstance(first, (str, bytes, int, float)):
        return first
    raise TypeError(
        f"hvdkit compare: a batch holds a {type(first).__name__}. Batches may hold tensors, numpy arrays, numbers, "
        f"strings, dicts, lists and tuples only."
    )


def _to_numpy(leaf: Any) -> Any:
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        leaf = leaf.float() if str(leaf.dtype) == "torch.bfloat16" else leaf
    return np.asarray(leaf)


#: (loader, number of its earlier iterations, batch)
Key = tuple[int, int, int]


class Patches(ExitStack):
    """Replaced attributes; close() restores the originals."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute."""
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


class Session:
    """One rank of one run.

    rank: this rank.
    size: number of ranks.
    folder: folder of this run.
    ranks: folder of the run on many ranks, from which batches, start and learning rates are read; None in that run.
    steps: the process ends after this number of steps.
    own_rates: keep the script's learning rates.
    """

    def __init__(
        self, rank: int, size: int, *, folder: str, ranks: str | None, steps: int, own_rates: bool = False
    ) -> None:
        self.folder, self.ranks = Path(folder), Path(ranks) if ranks else None
        self.steps, self.own_rates = steps, own_rates
        self.record = RankRecord(rank, size)
        self._written = False
        # The last batch, until it is known whether the script trains on it.
        self._batch: tuple[Key, Any, Callable[[], object]] | None = None
        self._rows, self._hashes = 0, list[str]()
        self._losses: list[float] = []
        self._states = b""
        self._random = False
        self.others = read_records(self.ranks) if self.ranks is not None else []
        self.given = _read_keys(self.ranks) if self.ranks is not None else {}
        atexit.register(self.write)

    def got(self, key: Key, batch: Any, states: bytes | None, trained: Callable[[], object] = lambda: None) -> None:
        """Take a batch that is about to go to the script.

        key: its key.
        batch: the batch.
        states: of the framework's random numbers, or None.
        trained: called when the script trains on it.
        """
        self._batch = key, copy(batch), trained
        self._states = b"" if states is None else states + _read_states()

    def trains(self, states: bytes | None) -> None:
        """Record that the script trains on the last batch; may be called repeatedly."""
        if self._states and states is not None:
            self._random |= states + _read_states() != self._states
        if self._batch is None:
            return
        (loader, number, index), batch, trained = self._batch
        self._batch = None
        trained()
        self._rows += count_rows(batch)
        self._hashes += hash_rows(batch)
        if self.ranks is None:
            with (self.folder / f"batch-{self.record.rank}-{loader}-{number}-{index}").open("wb") as file:
                pickle.dump(batch, file)

    def lost(self, loss: float) -> None:
        """Record a loss on which backward() is called."""
        self._losses.append(loss)

    def take(self) -> dict[str, Any]:
        """Return the records since the previous step, as arguments for a Step."""
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        seen = {"loss": loss, "rows": self._rows, "hashes": self._hashes, "random": self._random}
        self._losses, self._rows, self._hashes, self._random = [], 0, [], False
        return seen

    def batches(self, loader: int, number: int) -> list[Key]:
        """List the batches that ranks trained on in this iteration of the loader."""
        return sorted(key for key in self.given if key[:2] == (loader, number))

    def joined(self, key: Key) -> Any:
        """Join the batches of all ranks."""
        assert self.ranks is not None
        parts = []
        for rank in self.given[key]:
            with (self.ranks / "batch-{}-{}-{}-{}".format(rank, *key)).open("rb") as file:
                parts.append(pickle.load(file))
        return join(parts)

    @property
    def done(self) -> bool:
        """Have all steps been recorded?"""
        return len(self.record.steps) >= self.steps

    def write(self) -> None:
        """Write the record, once."""
        if not self._written:
            self._written = True
            write_record(self.record, self.folder)


def _read_states() -> bytes:
    kind, keys, position, *rest = np.random.get_state()
    return repr((kind, position, rest, random.getstate())).encode() + np.asarray(keys).tobytes()


def _read_keys(folder: Path) -> Mapping[Key, list[int]]:
    """Find which ranks trained on each batch."""
    found: dict[Key, list[int]] = {}
    for path in folder.glob("batch-*"):
        rank, *key = map(int, path.name.split("-")[1:])
        found.setdefault((key[0], key[1], key[2]), []).append(rank)
    return {key: sorted(ranks) for key, ranks in found.items()}
