"""Samples for this rank, of those that no rank has processed in this epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence, Sized
from typing import TypedDict

import numpy as np
from torch.utils.data import Sampler

from hvdkit.engine import basics
from hvdkit.training.sharding import Indices, split_for_training


class ElasticSamplerState(TypedDict):
    """How far an epoch is. processed_num: samples that all ranks together have processed in it."""

    epoch: int
    processed_num: int


class ElasticSampler(Sampler[int]):
    """Shares the samples of an epoch that are still to be processed, as many to every rank.

    Give it to a DataLoader and to a TorchState, call `record_batch` after each batch and `set_epoch` at the end of each
    epoch: after `restore` or `sync`, also with another number of ranks, the next loop goes on where the state was
    committed. A loop that has begun is not changed by what is recorded. Where the ranks do not divide the samples, the
    first ones of the epoch are repeated. ShardedSampler does without being told, but knows nothing of TorchState.

    dataset: of constant length. seed: the same on all ranks; plus the epoch it gives the order, Horovod's own.
    processed_num: samples processed by all ranks together. rank, num_replicas: this rank and their number.
    Raises NotInitializedError before init().
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def reset(self) -> None:
        """Share what is left of the epoch among the ranks that there are now."""
        self.rank, self.num_replicas, self._start = basics.rank(), basics.size(), self.processed_num
        self._order = _order_as_horovod(len(self.dataset), self.seed + self.epoch if self.shuffle else None)
        self._mine = split_for_training(self._order, rank=self.rank, size=self.num_replicas, start=self._start).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, with all samples. Call it when one has ended: at its beginning it would undo a resume."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed a batch. batch_idx: does not count; Horovod has it. batch_size: that of one rank."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Sequence[int]) -> None:
        """Every rank has processed as many samples as these, the next ones in its order."""
        self.record_batch(0, len(indices))

    def state_dict(self) -> ElasticSamplerState:
        """How far the epoch is; the same on every rank that has recorded as many samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: ElasticSamplerState) -> None:
        """Go on where `state_dict` was taken, with the ranks that there are now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    @property
    def remaining_indices(self) -> list[int]:
        """The samples that all ranks together still had to process at the last reset, in order."""
        return [int(index) for index in self._order[self._start :]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine)

    def __len__(self) -> int:
        """Samples of this rank."""
        return len(self._mine)


def _order_as_horovod(length: int, seed: int | None) -> Indices:
    """The order in which Horovod's sampler takes an epoch's samples, so that a run can be compared with Horovod's."""
    order = list(range(length))
    if seed is not None:
        random.Random(seed).shuffle(order)
    return np.array(order, dtype=np.int64)
