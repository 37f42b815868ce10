"""Synchronous steps with backup ranks: a step uses the gradients that come first, and drops the slowest ranks'.

Source: J. Chen et al., "Revisiting Distributed Synchronous SGD", 2016.

All ranks send their gradients to a server, which decides for each step whose are used, and answers every rank with the
same average of those. So all ranks take the same steps, and their parameters and optimizer states stay equal. A rank
that comes late gets the average that was made without it; it goes through the steps that it has missed one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from hvdkit.engine.api import Array, FlatValues, Group, Parameters, ProcessSet, check_process_set, runtime
from hvdkit.errors import TransportError
from hvdkit.strategies.arguments import check_integer, refuse_arguments
from hvdkit.strategies.served import ServedStrategy
from hvdkit.strategies.server import FINISH, PUSH, Answer

_WHO = "BackupSteps()"


class FirstGradients:
    """The Service that averages the gradients of each step that come first.

    size: ranks. drop: of how many ranks a step does not wait. ahead: by how many steps ranks may be before the slowest
    one; as many averages are kept for it. An answer notes how many steps behind the rank is after it, and whether its
    gradients were dropped (1.0).
    """

    def __init__(self, size: int, drop: int, ahead: int) -> None:
        self._size, self._drop, self._ahead = size, drop, ahead
        self._sent = [0] * size  # steps that each rank has sent gradients of
        self._decided = 0  # steps
        self._pending: dict[int, Array] = {}  # gradients of the next step to be decided, by rank
        self._contributors: dict[int, frozenset[int]] = {}  # by step, as the averages
        self._averages: dict[int, Array] = {}  # that not all ranks have
        self._finished: set[int] = set()

    def take(self, rank: int, kind: float, numbers: Array) -> None:
        if kind == FINISH:
            self._finished.add(rank)
            return
        self._sent[rank] += 1
        if self._sent[rank] > self._decided:
            self._pending[rank] = numbers.copy()

    def answers(self, waiting: Collection[int]) -> Mapping[int, Answer]:
        """See Service.answers. Ranks that have finished are answered together, when all have."""
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
        """Average what has come for the next step, if that is enough; summed in the order of ranks."""
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


class BackupSteps(ServedStrategy):
    """Every step averages the first gradients to come, of all ranks but `drop`; those that come later are dropped.

    Gradients that are there when the average is made are used, even of more ranks. ahead: see FirstGradients. dropped:
    how many gradients of this rank were dropped so far. behind: how many of this rank's next steps are decided already,
    so that it need not compute gradients for them.
    Raises ValueError or TypeError for numbers that cannot be used.
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
        """See ServedStrategy.open."""
        self._gradients = gradients = FlatValues(parameters.tensors, parameters.gradients)
        # Behind the gradients, for each tensor, whether a rank has one.
        self._flat = np.empty(gradients.count + len(parameters.tensors), gradients.dtype)
        service = FirstGradients(group.transport.size, self._drop, self._ahead)
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
    """The strategy that the arguments of BackupSteps() ask for; None for no other than AllReduce.

    others: arguments that it does not have. Raises ValueError or TypeError for what cannot be used.
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
    """Raise ValueError where every rank's gradients could be dropped."""
    if drop >= size:
        raise ValueError(
            f"{_WHO}: drop is {drop}, but there are {size} ranks, and a step needs the gradients of one at least. Use "
            f"at most drop={size - 1}."
        )
