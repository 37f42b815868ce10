"""Split the batches of DataLoaders over the ranks in training; in evaluation every rank reads all rows."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

import hvdkit.torch as hvd
from hvdkit_wrap import randomness, torch_agreement, torch_begin, torch_progress, torch_weights
from hvdkit_wrap.places import user_callsite
from hvdkit_wrap.refusal import refuse
from hvdkit_wrap.session import active, current
from hvdkit_wrap.shares import Share, join_batches, joined_length, plan_share

_epochs = itertools.count()
_CHUNK = 1024  # batches that rank 0 draws and broadcasts at a time; a sampler may have no end


class SplitBatches:
    """Wraps a loader's batch sampler; in training it yields this rank's rows of each batch."""

    def __init__(self, inner: Any, nominal: int | None) -> None:
        self._inner, self._nominal = inner, nominal
        self._training: bool | None = None  # was the last iteration for training?
        self._forced = False
        self.shares: list[Share] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def begin(self) -> bool:
        """Decide whether the next iteration is for training; if so, it records this rank's share of every batch."""
        self._training = self._forced or torch_begin.is_training()
        self.shares = []
        return self._training

    @contextmanager
    def forced(self) -> Iterator[None]:
        """Treat iterations inside this context as training, because Keras's fit() runs them."""
        self._forced = True
        try:
            yield
        finally:
            self._forced = False

    def __iter__(self) -> Iterator[list[Any]]:
        if not self._training or not active():
            return iter(self._inner)
        return self._draw(self.shares)

    def __len__(self) -> int:
        count = len(self._inner)
        trains = _looks_like_training(self._inner) if self._training is None else self._training
        return joined_length(count, _joined()) if trains and active() else count

    def _draw(self, shares: list[Share]) -> Iterator[list[Any]]:
        # Nothing is drawn before the first batch is requested, as without hvdkit: seeded runs give the same order.
        rank, size, joined = hvd.rank(), hvd.size(), _joined()
        nominal = self._nominal * joined if self._nominal else None
        for batch in join_batches(_from_rank_zero(self._inner), joined):
            shares.append(plan_share(batch, rank=rank, size=size, nominal=nominal))
            yield shares[-1].rows


def _joined() -> int:
    if not current().multiplies:
        return 1
    torch_begin.join()  # the size may be unknown before init()
    return current().size


def _looks_like_training(sampler: Any) -> bool:
    inner = getattr(sampler, "sampler", None)
    return inner is not None and not isinstance(inner, SequentialSampler)


def _from_rank_zero(sampler: Any) -> Iterator[list[Any]]:
    """Yield the batches of rank 0's sampler, so that the ranks agree whichever generator the sampler uses."""
    first = hvd.rank() == 0
    own = iter(sampler) if first else iter(())
    for number in itertools.count():
        chunk = [list(batch) for batch in itertools.islice(own, _CHUNK)]
        chunk, states = hvd.broadcast_object((chunk, randomness.read_states() if first and not number else None))
        if states is not None and not first:
            randomness.seed_per_rank(randomness.seed_of(states, hvd.rank()))
        yield from chunk
        if len(chunk) < _CHUNK:
            return


class Epoch:
    """Iterates over a loader in training, and records this rank's share with each batch."""

    def __init__(self, loader: Any, iterator: Any, batches: SplitBatches) -> None:
        self._iterator, self._shares, self._number = iterator, batches.shares, 0
        self._key, self._loader = next(_epochs), id(loader)
        self._line, self._passes, self._split = loader._hvdkit_line, torch_weights.passes, False
        try:
            self._length: int | None = len(batches)
        except TypeError:
            self._length = None
        torch_progress.began(self._loader)
        weakref.finalize(self, torch_weights.drop, self._key).atexit = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)

    def __iter__(self) -> Epoch:
        return self

    def __len__(self) -> int:
        return len(self._iterator)

    def __next__(self) -> Any:
        torch_progress.gave(self._loader, self._number, self._length)
        try:
            batch = next(self._iterator)
        except StopIteration:
            torch_weights.drop(self._key)
            torch_progress.ended(self._loader)
            self._check_use()
            torch_agreement.synchronize_ranks()
            raise
        torch_agreement.trained()
        self._split = self._split or self._shares[self._number].split
        torch_weights.give(self._key, self._shares[self._number])
        self._shares[self._number] = None  # type: ignore[call-overload]
        self._number += 1
        return batch

    def _check_use(self) -> None:
        if self._split and torch_weights.passes == self._passes:
            raise refuse(
                "the script read this DataLoader to its end without backward(), so the results are of the rows of one "
                "rank only",
                "Read it under torch.no_grad() or after model.eval(); then every rank gets all rows.",
                line=self._line,
            )


def watch() -> None:
    """Wrap the batch sampler of every new loader, and patch the beginning of every iteration."""
    init, iterate = DataLoader.__init__, DataLoader.__iter__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.__dict__["_hvdkit_line"] = user_callsite()
        if active() and self.batch_sampler is not None and not isinstance(self.dataset, IterableDataset):
            self.__dict__["batch_sampler"] = SplitBatches(self.batch_sampler, self.batch_size)

    def __iter__(self: Any) -> Any:
        if not active():
            return iterate(self)
        torch_begin.begin()
        batches = self.batch_sampler
        if not isinstance(batches, SplitBatches):
            if torch_begin.is_training():
                raise _no_rows(self)
            return iterate(self)
        if not batches.begin():
            torch_agreement.before_evaluation()
            current().report.say("data", f"DataLoader at {self._hvdkit_line}: evaluation, every rank reads all rows")
            return iterate(self)
        if getattr(self, "in_order", True) is False:
            raise refuse(
                "this DataLoader returns batches out of order (in_order=False), so ranks would combine different "
                "batches",
                "Remove in_order=False.",
                line=self._hvdkit_line,
            )
        _tell(self)
        return Epoch(self, iterate(self), batches)

    DataLoader.__init__ = __init__  # type: ignore[method-assign]
    DataLoader.__iter__ = __iter__  # type: ignore[method-assign]


def _no_rows(loader: Any) -> Exception:
    if isinstance(loader.dataset, IterableDataset):
        return refuse(
            f"the dataset of this DataLoader, {type(loader.dataset).__name__}, is an IterableDataset, so every rank "
            f"would train on the same samples",
            "Use a map-style dataset, or run `hvdkit migrate` and select the samples with hvd.rank() and hvd.size().",
            line=loader._hvdkit_line,
        )
    return refuse(
        "this DataLoader has batch_size=None, so --wrap cannot split a batch into rows",
        "Pass batch_size or batch_sampler to DataLoader().",
        line=loader._hvdkit_line,
    )


def _tell(loader: Any) -> None:
    session, size = current(), current().size
    count = loader.batch_size
    if session.multiplies:
        rows = (
            f"{count} rows on each rank, {count * size} per step" if count else f"{size} batches of the script per step"
        )
    elif count is None:
        rows = f"those of the script's batch_sampler, split over {size} ranks"
    elif count < size:
        rows = f"{count} rows cannot be split over {size} ranks, so every rank computes all of them"
    else:
        parts = sorted({len(plan_share(range(count), rank=rank, size=size).rows) for rank in range(size)})
        rows = f"{count} rows per step, as in the script; {' or '.join(map(str, parts))} on each rank"
    session.report.say(
        "data", f"DataLoader at {loader._hvdkit_line}: training, the rows of each batch are split over the ranks"
    )
    session.report.say("batch", rows)
    if isinstance(loader.sampler, RandomSampler):
        session.report.say("data", "samples in the order of rank 0; each rank draws its own dropout and augmentation")
