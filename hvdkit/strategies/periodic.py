"""Strategies of local steps: ranks step on their own gradients, and average their parameters periodically.

All ranks hold the same shared values. A rank sends the changes of its parameters relative to them. The average of these
changes moves the shared values, by an outer optimizer, and the parameters become the new shared values:

    change_r = parameters_r - shared          of rank r, sent
    shared   = outer(shared, mean of changes)
    parameters_r = shared                     + changes of rank r since it sent, if it did not wait

So the ranks send small numbers around zero, which lose little in a narrow dtype, and a joined rank sends zeros.
Fragments of the parameters may be averaged at different steps, and a fragment's average may be under way for some steps
while the ranks train (S. Shen et al., "Faster Distributed Deep Net Training: Computation and Communication Decoupled
Stochastic Gradient Descent", 2019; A. Douillard et al., "Streaming DiLoCo with overlapping communication", 2025).

Plain averages, LocalSGD's, take changes too. The parameters themselves through the buckets would be two passes over
each parameter, in place of six, and no copy in host memory. But with changes

- a parameter that no rank has changed keeps its bits, on any number of ranks;
- an average that a lost rank interrupts leaves the rank's own values: none is written before all of a fragment's are
  there;
- a narrow dtype between hosts rounds only the change, and 16-bit parameters add up changes below their resolution.

The price, by `python -m benchmarks.local_sgd_passes`: 10 million float32 parameters, two ranks in shared memory on a
virtual machine with two cores (AMD EPYC) under other work, three runs; ratios are medians of those within 40 turns:

    an average                  time                to two passes           standing memory of a rank
    LocalSGD                    99, 96, 130 ms      x1.93, x2.20, x1.94     164 MB
    two passes                  51, 46, 68 ms                               91 MB
    an allreduce a parameter    137, 96, 177 ms     x2.64, x2.17, x2.50     57 to 65 MB

The last is done as by torchft's LocalSGD, which also writes no parameter before all averages are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdkit.engine.api import (
    Action,
    AllReduce,
    Array,
    ArrayAverage,
    Group,
    Parameters,
    ParameterValues,
    ReduceOp,
    ReduceOptions,
    Statistics,
    Strategy,
    Transport,
    allgather_object,
    as_buffer,
    check_tensors,
    collective_step,
    zeros_for,
)
from hvdkit.errors import RanksDisagreeError
from hvdkit.strategies.arguments import check_integer
from hvdkit.strategies.fragments import due_fragment, split_fragments
from hvdkit.strategies.outer import OuterSGD

EVEN_STEPS = (
    "LocalSGD and DiLoCo need the same number of steps on all ranks: give every rank as many batches (drop_last, or a "
    "sampler that pads), and leave out hvd.join()."
)


@dataclass
class _Fragment:
    """Tensors that are averaged at the same steps.

    average: of their changes. began: the step after which the average under way began; None for no average. wanted:
    whether its result is used. changes: under way. sent: the parameters' values at the beginning, if the rank trains
    on.
    """

    indices: list[int]
    average: ArrayAverage
    began: int | None = None
    wanted: bool = True
    changes: list[Array] = field(default_factory=list)
    sent: list[Array] = field(default_factory=list)


class PeriodicAverage(Strategy):
    """Base class of LocalSGD and DiLoCo; see them and the module's docstring.

    every: number of steps between two averages.
    outer: the outer optimizer.
    start_after, fragments, overlap: see LocalSGD.
    gradients: reduces the gradients in the first `start_after` steps; later data is sent with its options, too.
    """

    equal_replicas = False

    def __init__(
        self,
        every: int,
        outer: OuterSGD,
        *,
        start_after: int = 0,
        fragments: int = 1,
        overlap: int = 0,
        gradients: AllReduce | None = None,
    ) -> None:
        who = f"{type(self).__name__}()"
        check_integer(who, "every", every, 1)
        check_integer(who, "start_after", start_after, 0)
        check_integer(who, "fragments", fragments, 1)
        check_integer(who, "overlap", overlap, 0)
        if fragments > every:
            raise ValueError(
                f"{who}: fragments is {fragments} and every is {every}; at most one fragment meets after a step, so "
                f"use at most fragments={every}."
            )
        if overlap >= every:
            raise ValueError(
                f"{who}: overlap is {overlap} and every is {every}; an average has to end before the next one of the "
                f"same parameters begins, so use at most overlap={every - 1}."
            )
        if not isinstance(outer, OuterSGD):
            raise TypeError(f"{who}: outer is {outer!r}; pass hvd.OuterSGD(lr, momentum).")
        self.every, self.outer, self.start_after = every, outer, start_after
        self._fragment_count, self._overlap = fragments, overlap
        self._gradients = gradients if gradients is not None else AllReduce(ReduceOptions())
        if not self._gradients.options.average:
            raise ValueError(f"{who}: gradients must be averaged in the first steps, not summed.")
        # In local steps before_step() does nothing, so hooks are useful in the first steps only.
        self.overlaps_backward = start_after > 0
        self._steps = 0
        self._parameters: Parameters | None = None
        self._values: ParameterValues | None = None
        self._shared: dict[str, Array] = {}  # by the name of the parameter, as the next two
        self._velocity: dict[str, Array] = {}
        self._met: dict[str, int] = {}  # the step after which the values were averaged last
        self._layouts: dict[str, str] = {}  # of the shared values, as TensorSpec.layout; unknown for a loaded state
        self._fragments: list[_Fragment] = []
        self._reading = False  # whether the next step must set missing shared values from the parameters

    def __str__(self) -> str:
        return (
            f"{type(self).__name__} every {self.every} steps after {self.start_after}, {self.outer}, "
            f"{self._fragment_count} fragments, overlap {self._overlap}, {self._gradients.options}"
        )

    @property
    def loss_op(self) -> ReduceOp | None:
        """See Strategy.loss_op."""
        return self._gradients.loss_op if self._steps < self.start_after else None

    @property
    def statistics(self) -> Statistics:
        """See Strategy.statistics."""
        return self._gradients.statistics

    @property
    def steps(self) -> int:
        """The number of steps that the optimizer has made."""
        return self._steps

    def attach(self, parameters: Parameters, group: Group) -> None:
        """See Strategy.attach. All ranks get rank 0's shared values, momentum and number of steps.

        Averages under way are dropped: the next averages include their changes.
        """
        self._close(in_step=True)
        check_tensors(group.transport, parameters.tensors, str(self))
        counts = [tensor.count for tensor in parameters.tensors]
        parts = split_fragments(counts, self._fragment_count) if counts else []
        self._parameters, self._group = parameters, group
        self._values = ParameterValues(parameters.tensors, parameters.values)
        self._read_missing()
        self._take_from_root(group.transport)
        warms_up = self._steps < self.start_after
        self._gradients.attach(parameters if warms_up else dataclasses.replace(parameters, tensors=()), group)
        for number, indices in enumerate(parts):
            average = ArrayAverage(
                f"{parameters.name}.fragment.{number}",
                [parameters.tensors[index] for index in indices],
                group,
                self._gradients.options,
                self.statistics,
                compute_threads=parameters.compute_threads,
                background=self._overlap > 0,
                joined_cure=EVEN_STEPS,
            )
            self._fragments.append(_Fragment(indices, average))

    @property
    def _names(self) -> list[str]:
        assert self._parameters is not None
        return [tensor.name for tensor in self._parameters.tensors]

    def _read_missing(self) -> None:
        """Set missing shared values to the parameters' present values.

        Raises ValueError for a parameter whose memory order differs from that of its shared values.
        """
        assert self._parameters is not None and self._values is not None
        for tensor in self._parameters.tensors:
            if self._layouts.get(tensor.name, tensor.layout) != tensor.layout:
                raise ValueError(
                    f"{type(self).__name__}: the shared values of {tensor.name} have the memory format "
                    f"{self._layouts[tensor.name] or 'contiguous'!r}, and the parameter now has "
                    f"{tensor.layout or 'contiguous'!r}. Convert the model back, with model.to(memory_format=...), on "
                    "all ranks, or load the optimizer's state again."
                )
        self._layouts = {tensor.name: tensor.layout for tensor in self._parameters.tensors}
        shared, velocity, met = self._shared, self._velocity, self._met
        self._shared, self._velocity, self._met = {}, {}, {}
        for index, tensor in enumerate(self._parameters.tensors):
            name, known = tensor.name, shared.get(tensor.name)
            if known is not None and known.size != tensor.count:
                known = None
            self._shared[name] = self._values.read(index).copy() if known is None else known
            self._met[name] = self._steps if known is None else met.get(name, 0)
            if self.outer.momentum:
                old = velocity.get(name)
                self._velocity[name] = zeros_for(tensor) if old is None or known is None else old
        self._reading = False

    def _take_from_root(self, transport: Transport) -> None:
        mine = self._steps, self._met, any(array.any() for array in self._velocity.values())
        self._steps, self._met, moved = allgather_object(transport, mine)[0]
        for array in (*self._shared.values(), *(self._velocity.values() if moved else ())):
            if array.size:
                transport.broadcast(as_buffer(array), 0)
        if not moved:
            for array in self._velocity.values():
                array[:] = 0

    def arrived(self, index: int) -> None:
        """See Strategy.arrived."""
        if self._steps < self.start_after:
            self._gradients.arrived(index)

    def cancel(self) -> None:
        """See Strategy.cancel."""
        if self._steps < self.start_after:
            self._gradients.cancel()

    def before_step(self) -> None:
        """See Strategy.before_step."""
        if self._reading:
            self._read_missing()
        if self._steps < self.start_after:
            self._gradients.before_step()

    def after_step(self) -> None:
        """See Strategy.after_step. Raises RankLostError if a rank has ended."""
        self._steps += 1
        local = self._steps - self.start_after
        if local == 0:
            self._end_warm_up()
        if local <= 0:
            return
        ending = [
            fragment
            for fragment in self._fragments
            if fragment.began is not None and self._steps - fragment.began >= self._overlap
        ]
        due = due_fragment(local, self.every, self._fragment_count) if self._fragments else None
        if ending or (due is not None and not self._overlap):
            self._agree()
        for fragment in ending:
            self._end(fragment)
        if due is not None:
            self._begin(self._fragments[due], keep=self._overlap > 0)
            if not self._overlap:
                self._end(self._fragments[due])

    def _agree(self) -> None:
        """Check that all ranks call this after the same step, else raise HorovodInternalError on all; collective.

        Otherwise a rank would wait in an average for another that has ended its steps and waits in synchronize().
        """
        self._together("meeting", options=[("steps", str(self._steps))])

    def _end_warm_up(self) -> None:
        """Set the shared values to rank 0's present values, as rounding may differ between ranks; collective.

        Raises HorovodInternalError if a rank has joined, as it would continue without them.
        """
        self._shared.clear()
        self._read_missing()
        self._together("local_steps", lambda transport, _: self._take_from_root(transport))

    def _together(self, kind: str, action: Action | None = None, options: Sequence[tuple[str, str]] = ()) -> None:
        """See collective_step(); an error about ranks that disagree also contains the remedy."""
        assert self._parameters is not None
        try:
            collective_step(self._group.engine, kind, action, name=self._parameters.name, options=options)
        except RanksDisagreeError as error:
            raise RanksDisagreeError(f"{error} {EVEN_STEPS}") from error

    def synchronize(self) -> None:
        """Average all parameters that were not averaged since the last step; collective.

        Afterwards they are equal on all ranks, and no average is under way. Raises HorovodInternalError if ranks have
        made different numbers of steps.
        """
        if self._parameters is None:
            return
        self._agree()
        if self._steps <= self.start_after:
            return
        for fragment in self._fragments:
            if fragment.began is not None:
                self._end(fragment)
        names = self._names
        for fragment in self._fragments:
            if any(self._met[names[index]] < self._steps for index in fragment.indices):
                self._begin(fragment, keep=False)
                self._end(fragment)

    def drop(self) -> None:
        """Discard the results of averages under way, on all ranks; the next averages include their changes."""
        for fragment in self._fragments:
            fragment.wanted = False

    def _begin(self, fragment: _Fragment, *, keep: bool) -> None:
        assert self._values is not None
        names = self._names
        fragment.sent, fragment.changes = [], []
        for index in fragment.indices:
            own = self._values.read(index)
            shared = self._values.rounded(index, self._shared[names[index]])
            if keep:
                fragment.sent.append(own.copy())
                fragment.changes.append(own - shared)
            else:
                fragment.changes.append(np.subtract(own, shared, out=own))
        fragment.began, fragment.wanted = self._steps, True
        fragment.average.begin(fragment.changes)

    def _end(self, fragment: _Fragment) -> None:
        """Wait for the average, and continue from the outer optimizer's result."""
        assert self._values is not None and fragment.began is not None
        fragment.average.finish()
        names = self._names
        for at, index in enumerate(fragment.indices if fragment.wanted else ()):
            name = names[index]
            shared = self._shared[name]
            self.outer.step(shared, fragment.changes[at], self._velocity.get(name))
            self._met[name] = fragment.began
            if fragment.sent:
                own = self._values.read(index)
                own -= fragment.sent[at]
                own += self._values.rounded(index, shared)
                self._values.write(index, own)
            else:
                self._values.write(index, shared)
        fragment.began, fragment.sent, fragment.changes = None, [], []

    def detach(self) -> None:
        """See Strategy.detach."""
        self._close(in_step=False)
        self._gradients.detach()
        self._parameters = self._values = None

    def _close(self, *, in_step: bool) -> None:
        for fragment in self._fragments:
            if in_step and fragment.began is not None:
                fragment.average.finish()
            fragment.average.close(in_step=in_step)
        self._fragments = []

    def state_dict(self) -> dict[str, Any]:
        """See Strategy.state_dict: the number of steps, and the state of each parameter.

        For each parameter: the shared values, the outer momentum, and the step of the last average. Averages under way
        are not part of it.
        """
        return {
            "steps": self._steps,
            "shared": {name: array.copy() for name, array in self._shared.items()},
            "velocity": {name: array.copy() for name, array in self._velocity.items()},
            "met": dict(self._met),
            "layouts": dict(self._layouts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Strategy.load_state_dict. An empty state: start anew, from the parameters of the next step."""
        if state and {*state} - {"layouts"} != {"steps", "shared", "velocity", "met"}:
            raise ValueError(
                f"{type(self).__name__}.load_state_dict() needs steps, shared, velocity and met; the state has "
                f"{', '.join(sorted(map(str, state)))}. It was saved by another strategy."
            )
        self.drop()
        self._steps = int(state.get("steps", 0))
        self._shared = {name: np.array(array) for name, array in state.get("shared", {}).items()}
        self._velocity = {name: np.array(array) for name, array in state.get("velocity", {}).items()}
        self._met = {name: int(step) for name, step in state.get("met", {}).items()}
        self._layouts = dict(state.get("layouts", {}))
        self._reading = self._parameters is not None
