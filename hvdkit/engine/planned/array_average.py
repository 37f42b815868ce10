"""Asynchronous average of arrays over all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hvdkit.engine import runtime
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.arrays import ArraySource
from hvdkit.engine.planned.plan import Plan, TensorSpec
from hvdkit.engine.planned.progress import has_spare_core
from hvdkit.engine.planned.reducer import BucketReducer, Context, Statistics
from hvdkit.engine.planned.settings import settings_of
from hvdkit.engine.planned.values import math_dtype
from hvdkit.engine.request import ReduceOptions
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.buffer import Array

_ALL = 2**31  # buckets in flight


class ArrayAverage:
    """Averages arrays of the same shapes over the ranks of a group, in place and repeatedly.

    All ranks open it together; a rank that has joined takes part with zeros.

    name: the same on all ranks.
    tensors: the parameters; the arrays have their math_dtype().
    group: the ranks that average.
    options: the reduction, with the wire dtype or coding between hosts.
    statistics: added to.
    compute_threads: see Parameters.
    background: average while this rank trains; a thread drives it then, and memory is allocated for all buckets at
        once.
    joined_cure: the remedy in the error of begin().
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[TensorSpec],
        group: Group,
        options: ReduceOptions,
        statistics: Statistics,
        *,
        compute_threads: int,
        background: bool,
        joined_cure: str,
    ) -> None:
        current = runtime.runtime("A strategy that averages parameters")
        specs = [dataclasses.replace(tensor, dtype=math_dtype(tensor.dtype), place=0, group=None) for tensor in tensors]
        settings = settings_of(current.config)
        if background:
            settings = dataclasses.replace(settings, buckets_in_flight=_ALL, progress="thread")
        self._source = ArraySource(len(specs), complete=True)
        self._reducer = BucketReducer(
            Context(
                group.transport,
                name,
                group.engine,
                current.timeline,
                has_spare_core(current.cores, compute_threads),
            ),
            specs,
            self._source,
            options=options,
            settings=settings,
            statistics=statistics,
        )
        self._indices, self._cure = range(len(specs)), joined_cure
        self._name, self._all_rounds = name, group.engine.joining.rounds
        self._rounds = self._all_rounds[name]

    def begin(self, arrays: Sequence[Array]) -> None:
        """Begin to average arrays; collective. The caller must not touch them until finish().

        Raises HorovodInternalError on a rank that had joined and so missed the results of earlier averages.
        """
        missed = self._all_rounds[self._name] - self._rounds
        if missed:
            raise HorovodInternalError(
                f"This rank had called hvd.join() while other ranks averaged parameters {missed} times, so it does not "
                f"have what they go on from. {self._cure}"
            )
        self._rounds += 1
        self._source.begin(arrays)
        for index, array in enumerate(arrays):
            self._source.put(index, array)
        for index in reversed(self._indices):
            self._reducer.arrived(index)

    def finish(self) -> None:
        """Return when the arrays hold the averages; collective. Raises RankLostError if a rank has ended."""
        self._reducer.finish()
        self._source.finish()

    def close(self, *, in_step: bool) -> None:
        """Free the memory; collective. in_step: May some ranks have joined, and be in zero rounds?"""
        self._source.on_plan(Plan((), ()))
        if in_step:
            self._reducer.drain_and_close()
        else:
            self._reducer.close()
