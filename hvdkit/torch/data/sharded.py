"""ShardedSampler: the samples of this rank, for `torch.utils.data.DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Literal, TypedDict

from torch.utils.data import Sampler

from hvdkit.torch.data.repeated_order import count_steps, warn_of_repeated_order
from hvdkit.training.sharding import Indices, plan_order, split_for_evaluation, split_for_training


class SamplerState(TypedDict):
    """The progress of an epoch, for a checkpoint.

    used: samples that all ranks together have used in this epoch.
    """

    epoch: int
    used: int
    seed: int


class ShardedSampler(Sampler[int]):
    """Sample this rank's share of the indices of a dataset: `DataLoader(dataset, sampler=ShardedSampler(dataset))`.

    In training every rank gets the same number of samples, in an order that is shuffled for each epoch: call
    `set_epoch`, or rank 0 warns of a second epoch in the same order. With `evaluation=True` the samples stay in order,
    each one is on exactly one rank, and the numbers of samples may differ by one; average over ranks with
    `hvd.metrics.Mean`, which weights by the number of samples.

    dataset: with a length.
    rank: this rank; None: that of the job.
    size: number of ranks; None: that of the job.
    shuffle: whether to shuffle the samples in training.
    seed: of the order; the same on all ranks.
    uneven: in training, if the length is not a multiple of the number of ranks, "pad" repeats the first few samples and
    "drop" leaves out the last ones.
    evaluation: keep the order, and use each sample once.

    The attribute `trained`: samples of this rank in this epoch, since it began or was resumed, as counted by
    record_batch(); None without it.
    Raises NotInitializedError before init() if rank or size is None.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        rank: int | None = None,
        size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        uneven: Literal["pad", "drop"] = "pad",
        evaluation: bool = False,
    ) -> None:
        if rank is None or size is None:
            from hvdkit.engine import basics

            rank = basics.rank() if rank is None else rank
            size = basics.size() if size is None else size
        self.dataset = dataset
        self.rank = rank
        self.size = size
        self.shuffle = shuffle and not evaluation
        self.seed = seed
        self.uneven = uneven
        self.evaluation = evaluation
        self.epoch = 0
        self._start = 0  # samples of all ranks that had been used when this epoch began or was resumed
        self._given = 0  # samples given to this rank since then
        self.trained: int | None = None
        self._finished = False
        self._trained_on = False  # steps were made in an iteration of this epoch
        self._plan()  # reports an impossible shard here, not in the first epoch

    def __iter__(self) -> Iterator[int]:
        if self._finished:
            self._start = 0
        self._given, self.trained, self._finished = 0, None, False
        if self._trained_on and self.shuffle:
            warn_of_repeated_order("ShardedSampler", first=self.rank == 0)
        steps, epoch = count_steps(), self.epoch
        try:
            for index in self._plan().tolist():
                self._given += 1
                yield index
        finally:
            self._trained_on = epoch == self.epoch and count_steps() > steps  # an interrupted loop may end here late
        self._finished = True

    def __len__(self) -> int:
        """Return the number of this rank's samples in the next iteration."""
        return len(self._plan())

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this epoch; call it on every rank before the epoch begins.

        A resumed epoch continues at the sample where it was saved; any other epoch begins at its first sample.
        """
        if epoch != self.epoch or self._finished:
            self._start, self._given, self.trained, self._finished = 0, 0, None, False
        self.epoch, self._trained_on = epoch, False

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count batch_size more samples that this rank has trained on; Checkpoints.step() calls it. batch_idx: ignored.

        Needed if the DataLoader has worker processes: these fetch samples ahead, which are not trained on yet.
        ElasticSampler has the same method.
        """
        self.trained = (self.trained or 0) + batch_size

    def state_dict(self, given: int | None = None) -> SamplerState:
        """Return the training's progress; the same on every rank, so that rank 0 can save it.

        given: number of samples of this rank that were trained on since this epoch began or was resumed; the epoch is
        then not over, even if these are all. None for recorded samples, or without records those from this sampler.
        """
        trained = self.trained if given is None else given
        over = given is None and self._finished and (trained is None or trained >= self._given)
        if over:
            return {"epoch": self.epoch + 1, "used": 0, "seed": self.seed}
        mine = 0 if self.evaluation else self._given if trained is None else trained
        used = self._start + mine * self.size
        return {"epoch": self.epoch, "used": min(used, len(self.dataset)), "seed": self.seed}

    def load_state_dict(self, state: SamplerState) -> None:
        """Resume where `state` was saved, also with another number of ranks.

        Start the training loop with `range(sampler.epoch, epochs)`. An evaluation always starts at its first sample.
        """
        self.epoch, self._start, self.seed = state["epoch"], state["used"], state["seed"]
        self._given, self.trained, self._finished, self._trained_on = 0, None, False, False

    def _plan(self) -> Indices:
        order = plan_order(len(self.dataset), seed=self.seed if self.shuffle else None, epoch=self.epoch)
        if self.evaluation:
            return split_for_evaluation(order, rank=self.rank, size=self.size)
        start = 0 if self._finished else self._start
        return split_for_training(order, rank=self.rank, size=self.size, uneven=self.uneven, start=start)
