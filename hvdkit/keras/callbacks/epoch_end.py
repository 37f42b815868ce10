"""The end of an epoch of fit(): an error on all ranks if other ranks have more batches.

Such ranks wait in a reduction of gradients, which reports a long wait as a named operation (planned/progress.py). A
rank at the end of its epoch submits an operation with the name of the next reduction: it succeeds if all ranks are
at the end, and fails as a disagreement if a rank waits in that reduction. A rank that is only slow submits neither.
"""

from __future__ import annotations

import contextlib

from hvdkit.engine.named.api import Engine
from hvdkit.engine.named.operation import OperationRequest
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.polling import Backoff

_USED = ".used"  # ends the name of a plan that belongs to another one


class EpochEnd:
    """Compares the ranks at the ends of epochs by the reductions of the epoch. engine: of the ranks that train."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: dict[str, int] = {}

    def begin(self) -> None:
        """Take note that an epoch begins."""
        self._before = dict(self._engine.joining.rounds)

    def check(self, epoch: int) -> None:
        """Wait until all ranks are at the end of the epoch; collective.

        Does nothing if the epoch has reduced the gradients of no optimizer, or of several, which may be in a round.
        epoch: from 1.
        Raises RanksDisagreeError if another rank waits in the next reduction.
        """
        engine = self._engine
        rounds = engine.joining.rounds
        # By the rounds, which all ranks count alike: plans are gone once a rank has collected their optimizer.
        steps = {name: count - self._before.get(name, 0) for name, count in sorted(rounds.items())}
        changed = [name for name, count in steps.items() if count > 0]
        trained = {name: plan for name in changed if (plan := engine.joining.plans.get(name)) and plan.next_wait}
        own = [steps[name] for name in changed if not name.endswith(_USED)]
        if len({name.removesuffix(_USED) for name in changed}) != 1 or not own or not trained:
            return
        request = OperationRequest(
            f"the end of epoch {epoch} of fit() after {own[0]} steps (other ranks have more: give every rank the "
            "same number, with steps_per_epoch or hvd.shard())",
            (),
        )
        names = [plan.next_wait for plan in trained.values()]
        operations = [engine.submit(name, request, ()) for name in names]
        backoff = Backoff(engine.transport.check)
        try:
            while not all(operation.done for operation in operations):
                failed = next((operation.error for operation in operations if operation.error is not None), None)
                if failed is not None:
                    raise failed
                if not engine.drive():
                    backoff.pause()
        finally:  # also after Ctrl-C: a later wait has the same name
            for name, operation in zip(names, operations, strict=True):
                if not operation.done:
                    with contextlib.suppress(HorovodInternalError):
                        engine.withdraw(name)
        for operation in operations:
            if operation.error is not None:
                raise operation.error
