"""Sampler of the samples for this rank that no rank has processed in this epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence, Sized
from typing import TypedDict

import numpy as np
from torch.utils.data import Sampler

from hvdkit.engine import basics
from hvdkit.training.sharding import Indices, split_for_training


class ElasticSamplerState(TypedDict):
    """Progress of an epoch. processed_num: samples that all ranks together have processed in it."""

    epoch: int
    processed_num: int


class ElasticSampler(Sampler[int]):
    """Distribute the unprocessed samples of an epoch, the same number to every rank.

    Pass it to a DataLoader and to a TorchState. Call `record_batch` after each batch and `set_epoch` at the end of each
    epoch. After `restore` or `sync`, also with another number of ranks, the next loop continues where the state was
    committed. Recording does not change a loop that has started. If the number of samples is not a multiple of the
    number of ranks, the first samples of the epoch are repeated. ShardedSampler needs no calls, but does not support
    TorchState.

    dataset: of constant length.
    shuffle: whether to shuffle the samples.
    seed: the same on all ranks; seed + epoch determines the order, which is Horovod's.

    The attributes processed_num: samples that all ranks together have processed; rank, num_replicas: this rank and the
    number of ranks.
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
        """Distribute the rest of the epoch over the current ranks."""
        self.rank, self.num_replicas, self._start = basics.rank(), basics.size(), self.processed_num
        self._order = _order_as_horovod(len(self.dataset), self.seed + self.epoch if self.shuffle else None)
        self._mine = split_for_training(self._order, rank=self.rank, size=self.num_replicas, start=self._start).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch with all samples. Call it at the end of an epoch; at the start it would undo a resume."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch. batch_idx: ignored, as in Horovod. batch_size: of one rank."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Sequence[int]) -> None:
        """Record that every rank has processed the next len(indices) samples in its order."""
        self.record_batch(0, len(indices))

    def state_dict(self) -> ElasticSamplerState:
        """Return the progress of the epoch; the same on every rank that has recorded as many samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: ElasticSamplerState) -> None:
        """Resume where `state_dict` was saved, with the current ranks."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    @property
    def remaining_indices(self) -> list[int]:
        """The samples that all ranks together still had to process at the last reset, in order."""
        return [int(index) for index in self._order[self._start :]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine)

    def __len__(self) -> int:
        """Return the number of this rank's samples."""
        return len(self._mine)


def _order_as_horovod(length: int, seed: int | None) -> Indices:
    """Return the order of Horovod's sampler for an epoch's samples, so that runs can be compared with Horovod's."""
    order = list(range(length))
    if seed is not None:
        random.Random(seed).shuffle(order)
    return np.array(order, dtype=np.int64)
