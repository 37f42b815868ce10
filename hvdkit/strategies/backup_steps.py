"""Synchronous steps with backup ranks: a step uses the gradients that arrive first, and drops those of the slowest.

Source: J. Chen et al., "Revisiting Distributed Synchronous SGD", 2016.

All ranks send their gradients to a server, which selects the used ones for each step, and answers every rank with
the same average of those. So all ranks make the same steps, and their parameters and optimizer states stay equal. A
late rank gets the average that was made without it; it makes the missed steps one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from hvdkit.engine.api import Array, FlatValues, Group, Parameters, ProcessSet, check_process_set, runtime
from hvdkit.errors import TransportError
from hvdkit.strategies.arguments import check_integer, refuse_arguments
from hvdkit.strategies.served import ParameterServerStrategy
from hvdkit.strategies.server import FINISH, PUSH, Answer

_WHO = "BackupSteps()"


class QuorumAverager:
    """The RequestHandler that averages the gradients that arrive first in each step.

    size: number of ranks. drop: number of ranks that a step does not wait for. ahead: number of steps that ranks may be
    ahead of the slowest one; as many averages are kept for it. An answer contains the number of steps that the rank is
    behind after it, and 1.0 if its gradients were dropped.
    """

    def __init__(self, size: int, drop: int, ahead: int) -> None:
        self._size, self._drop, self._ahead = size, drop, ahead
        self._sent = [0] * size  # number of gradients that each rank has sent
        self._decided = 0  # number of decided steps
        self._pending: dict[int, Array] = {}  # rank -> its gradients for the next undecided step
        self._contributors: dict[int, frozenset[int]] = {}  # step -> ranks whose gradients were used
        self._averages: dict[int, Array] = {}  # step -> average, until all ranks have it
        self._finished: set[int] = set()

    def take(self, rank: int, kind: float, numbers: Array) -> None:
        if kind == FINISH:
            self._finished.add(rank)
            return
        self._sent[rank] += 1
        if self._sent[rank] > self._decided:
            self._pending[rank] = numbers.copy()

    def answers(self, waiting: Collection[int]) -> Mapping[int, Answer]:
        """See RequestHandler.answers. Finished ranks are answered together, when all have finished."""
        most = max(self._sent)
        early = sorted(rank for rank in self._finished if self._sent[rank] < most)
        if early:
            raise TransportError(
                f"{_WHO}: ranks {early} called optimizer.finish() after {self._sent[early[0]]} steps, but rank "
                f"{self._sent.index(most)} has taken {most}. Give every rank as many batches (drop_last, or a sampler "
                "that pads)."
            )
        self._decide()
        if len(self._finished) == self._size:
            self._finished.clear()
            return dict.fromkeys(waiting, Answer(np.zeros(1)))
        found = {}
        for rank in sorted(set(waiting) - self._finished):
            step = self._sent[rank]
            if step <= self._decided:
                dropped = float(rank not in self._contributors[step])
                found[rank] = Answer(self._averages[step], (self._decided - step, dropped))
        for step in [step for step in self._averages if step <= min(self._sent)]:
            del self._averages[step], self._contributors[step]
        return found

    def _decide(self) -> None:
        """Average the gradients of the next step if enough have arrived; summed in the order of ranks."""
        step = self._decided + 1
        if len(self._pending) < self._size - self._drop or step - min(self._sent) > self._ahead:
            return
        total, *others = (self._pending[rank] for rank in sorted(self._pending))
        for each in others:
            total += each
        total /= len(self._pending)
        self._averages[step], self._contributors[step] = total, frozenset(self._pending)
        self._decided = step
        self._pending = {}


class BackupSteps(ParameterServerStrategy):
    """Strategy that averages the first gradients to arrive, of all ranks but `drop`; later gradients are dropped.

    All gradients that are there when the average is made are used. ahead: see QuorumAverager. The attribute `dropped`:
    number of this rank's gradients that were dropped so far. The attribute `behind`: number of this rank's next steps
    that are already decided, so that it need not compute gradients for them.
    Raises ValueError or TypeError for invalid numbers.
    """

    who = _WHO
    repeatable = False
    loss_op = None  # a step does not wait for the loss of the slowest rank

    def __init__(self, drop: int = 1, *, ahead: int = 16) -> None:
        super().__init__()
        check_integer(_WHO, "drop", drop, 0)
        check_integer(_WHO, "ahead", ahead, 1)
        self._drop, self._ahead = drop, ahead
        self.behind = self.dropped = 0
        self._gradients: FlatValues | None = None

    def describe(self, size: int) -> str:
        _check_drop(self._drop, size)
        return f"BackupSteps {self._drop} {self._ahead}"

    def open(self, parameters: Parameters, group: Group) -> None:
        """See ParameterServerStrategy.open."""
        self._gradients = gradients = FlatValues(parameters.tensors, parameters.gradients)
        # After the gradients: for each tensor, whether a rank has a gradient.
        self._flat = np.empty(gradients.count + len(parameters.tensors), gradients.dtype)
        service = QuorumAverager(group.transport.size, self._drop, self._ahead)
        self.open_server(group, 0, self._flat.size, gradients.dtype, service)

    def before_step(self) -> None:
        """See Strategy.before_step; waits until the step is decided. Raises RankLostError if a rank has ended."""
        if self._gradients is None:
            return
        gradients, used = self._flat[: self._gradients.count], self._flat[self._gradients.count :]
        self._gradients.read(gradients)
        used[:] = 1
        used[list(self._gradients.unused)] = 0
        (link,) = self._links
        link.ask(PUSH, self._flat)
        answer = link.answer()
        np.copyto(self._flat, answer.numbers)
        self.behind = int(answer.notes[0])
        self.dropped += int(answer.notes[1])
        self._gradients.write(gradients, np.flatnonzero(used == 0).tolist())

    def finish(self) -> None:
        """Wait until all ranks call it, after equally many steps; collective. Steps may follow."""
        for link in self._links:
            link.ask(FINISH)
            link.answer()

    def detach(self) -> None:
        self._gradients, self.behind = None, 0
        super().detach()


def choose_backup_steps(drop: int, ahead: int, process_set: ProcessSet, others: Collection[str]) -> BackupSteps | None:
    """Return the strategy for the arguments of BackupSteps(); None for AllReduce.

    drop, ahead: as for BackupSteps.
    process_set: the ranks that train together.
    others: names of unsupported arguments.

    Raises ValueError or TypeError for invalid arguments.
    """
    refuse_arguments(_WHO, others)
    check_process_set(process_set, _WHO)
    strategy = BackupSteps(drop, ahead=ahead)
    runtime(_WHO)
    if not process_set.included():
        return None
    _check_drop(drop, process_set.size())
    return strategy if drop else None


def _check_drop(drop: int, size: int) -> None:
    """Raise ValueError if every rank's gradients could be dropped."""
    if drop >= size:
        raise ValueError(
            f"{_WHO}: drop is {drop}, but there are {size} ranks, and a step needs the gradients of one at least. Use "
            f"at most drop={size - 1}."
        )
