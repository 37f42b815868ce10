"""AsynchronousOptimizer: ranks step at their own pace, and servers keep the parameters."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.strategies.asynchronous import Asynchronous, choose_asynchronous
from hvdkit.strategies.backup_steps import BackupSteps
from hvdkit.torch.ops import barrier
from hvdkit.torch.optimizer import DistributedOptimizer, NamedParameters
from hvdkit.torch.optimizer_mixin import DistributedOptimizerMixin
from hvdkit.torch.picklable_as_plain import change_class


class AsynchronousMixin(DistributedOptimizerMixin):
    """Mixin of AsynchronousOptimizer(); its methods precede those of the optimizer's own class."""

    _hvdkit_set: ProcessSet = global_process_set

    def finish(self) -> None:
        """Wait until all ranks call it; afterwards their parameters are equal; collective. Steps may follow.

        Ranks may have taken different numbers of steps, except with staleness=0 and BackupSteps(). Call it before the
        parameters are evaluated or saved, and before the end of the script. Raises RankLostError if a rank has ended.
        """
        sync = self._hvdkit
        if sync is None:
            return
        if isinstance(sync.strategy, Asynchronous | BackupSteps):
            sync.attach()  # the first step of the other ranks waits for a rank that has made no step
            sync.strategy.finish()
        else:
            barrier(process_set=self._hvdkit_set)


def AsynchronousOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    staleness: int = 4,
    servers: int = 1,
    *,
    scale_by_staleness: bool = False,
    backward_passes_per_step: int = 1,
    process_set: ProcessSet = global_process_set,
    **others: Any,
) -> Any:
    """Make an optimizer step at this rank's pace; it waits only for ranks whose values would get too old.

    Returns the same object, as DistributedOptimizer() does. The optimizer steps on this rank's own gradients. The rank
    sends the change of its parameters, divided by the number of ranks, to the servers. A server adds each change when
    it arrives, and the rank continues from the values that the server then has. Each rank keeps its own optimizer
    state. Call finish() on all ranks after their last step, before evaluating or saving, in place of hvd.join(); ranks
    may make different numbers of steps.

    named_parameters: as for DistributedOptimizer().
    staleness: a rank waits when it has sent more changes than this since another rank began its present step. So a rank
    may be staleness + 1 times as fast as the slowest. 0 averages the gradients of all ranks in every step, as
    DistributedOptimizer() does.
    servers: number of servers; each of the first ranks runs a server thread, which keeps a slice of the parameters.
    scale_by_staleness: multiply a change by 1 / (1 + s). s is the number of changes that other ranks have sent since
    this rank received its values, divided by the number of ranks and rounded down.
    backward_passes_per_step: as for DistributedOptimizer().
    process_set: the ranks that train together.
    others: other arguments of DistributedOptimizer(), which are refused; the error names the alternative.

    Raises what DistributedOptimizer() raises; ValueError or TypeError for invalid numbers.
    """
    strategy = choose_asynchronous(
        staleness, servers, scaled=scale_by_staleness, process_set=process_set, others=others
    )
    wrapped = DistributedOptimizer(
        optimizer,
        named_parameters,
        backward_passes_per_step=backward_passes_per_step,
        process_set=process_set,
        strategy=strategy,
    )
    change_class(wrapped, AsynchronousMixin, wrapped._parameter_names, {"_hvdkit_set": process_set})
    return wrapped
