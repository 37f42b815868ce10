"""LoadBalancer: divides the batches of one optimizer by the speeds that the ranks measure and exchange.

On three ranks, one of which takes three times as long for a row as the others, a step with equal shares takes x2.12 of
the time of a step with LoadBalancer's shares, in Keras x2.17 to x2.19 (`hvdrun -np 3 python -m benchmarks.uneven`,
also with --keras; docs/guides/uneven_machines.md).
"""

from __future__ import annotations

import math
import statistics
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from hvdkit.balance.shares import Balance, Plans, Shares, part_of_batch
from hvdkit.engine.api import CollectiveCaller, Seconds, Transport, as_buffer


class LoadBalancer:
    """The division of batches among the ranks of one optimizer; it changes on all of them alike.

    who: the user's class, for messages.
    batch_size: rows of all ranks together.
    every: steps between two exchanges of measurements.
    transport: of the ranks; None for a rank that trains alone.
    speeds, grain: see Balance.

    Raises ValueError for invalid numbers.
    """

    def __init__(
        self,
        who: str,
        batch_size: int,
        every: int,
        transport: Transport | None,
        speeds: Sequence[float] | None = None,
        grain: int = 1,
    ) -> None:
        if every < 1:
            raise ValueError(f"{who}(): every is {every}; it must be 1 or more.")
        self._who, self._batch_size, self._every, self._grain = who, batch_size, every, grain
        self._speeds: list[float] | None = None
        self.enter(transport, speeds)
        self._speeds = None if speeds is None else list(speeds)

    def enter(self, transport: Transport | None, speeds: Sequence[float] | None = None) -> None:
        """Divide batches among the present ranks, as a new rank does, which passes the same speeds.

        speeds: None for those that were passed first, if their number fits.
        """
        self.rank, self.size = (0, 1) if transport is None else (transport.rank, transport.size)
        if self._speeds is not None and len(self._speeds) == self.size:
            speeds = self._speeds
        if self._batch_size < self.size * self._grain:
            rows = f" with at least grain={self._grain} rows each" if self._grain > 1 else ""
            raise ValueError(
                f"{self._who}(): batch_size is {self._batch_size}, but there are {self.size} ranks{rows}. It is the "
                f"number of rows of all ranks together; pass at least {self.size * self._grain}."
            )
        self._balance = Balance(self._batch_size, self.size, speeds, self._grain)
        self._plans = Plans(self._balance.plan)
        self._measured: list[tuple[int, Seconds]] = []  # rows and seconds of steps
        # A new rank has counted nothing, and all must exchange times after the same step.
        self._steps = 0
        self._entered = None if transport is None else weakref.ref(transport)

    def belongs_to(self, transport: Transport | None) -> bool:
        """Return whether `transport` is the one that enter() had; a later world may have as many ranks."""
        return transport is (None if self._entered is None else self._entered())

    @property
    def plan(self) -> Shares:
        """Rows of each rank in the batches that are divided next."""
        return self._balance.plan

    def begin(self, position: tuple[int, int]) -> None:
        """Begin an iteration over the data, with the batch at this position."""
        self._plans.forget(position)

    def part(self, position: tuple[int, int], rows: int) -> tuple[int, int]:
        """Return (first row, number of rows) of this rank in the batch of `rows` rows at a position; see Plans."""
        plan = part_of_batch(self._plans.at(position), rows)
        return sum(plan[: self.rank]), plan[self.rank]

    def stepped(
        self,
        caller: CollectiveCaller,
        rows: int,
        seconds: Seconds | None,
        position: Callable[[], tuple[int, int]],
        options: Sequence[tuple[str, object]],
    ) -> None:
        """Count a step of the optimizer; collective in the first step and every `every` steps.

        caller: calls the collective.
        rows: of this rank in the step, 0 if its time is not representative.
        seconds: time of the step; None if unknown.
        position: returns the position up to which this rank's batches were requested.
        options: (name, value) that must be equal on all ranks, else HorovodInternalError.
        """
        if rows and seconds is not None:
            self._measured.append((rows, seconds))
        self._steps += 1
        due = self._steps % self._every == 0
        if due or self._steps == 1:  # ranks with another `every` would wait for each other in different steps
            self._position = position
            own: list[tuple[str, object]] = [("every", self._every)]
            if self._steps == 1:
                own.append(("plan", self.plan))  # contains the effect of speeds and grain
            said = [(name, str(value)) for name, value in (*options, *own)]
            caller.together("balance", self._exchange if due else _agree, said)

    def _exchange(self, transport: Transport, _: Sequence[int]) -> None:
        """Exchange measured times and the position of each rank's batches, and change the plan; collective."""
        row_s = [seconds() / rows for rows, seconds in self._measured]
        self._measured.clear()
        mine = np.array([statistics.median(row_s) if row_s else math.nan, *self._position()], np.float64)
        known = transport.allgather(as_buffer(mine), [3] * transport.size).array.reshape(-1, 3)
        if self._balance.add_times(known[:, 0].tolist()):
            self._plans.change(max((int(iteration), int(batch)) for _, iteration, batch in known), self._balance.plan)


def _agree(_: Transport, __: Sequence[int]) -> None:
    """Do nothing: the operation has already compared the ranks' options."""
