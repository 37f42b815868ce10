"""Training in graphs for tf.compat.v1.Session: optimizers of tf.compat.v1.train, and broadcast of variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvdkit.engine import runtime as engine
from hvdkit.engine.compression import Coded
from hvdkit.engine.groups import ProcessSet, check_process_set
from hvdkit.engine.reduce_op import ReduceOp
from hvdkit.tensorflow.compression import Compressor
from hvdkit.tensorflow.state import broadcast_variables
from hvdkit.tensorflow.tape import Reduce, reduction
from hvdkit.tensorflow.tracing import in_python, in_session

_CALL = "DistributedOptimizer()"


class _DistributedOptimizer:
    """Mixin of wrapped optimizers; its methods precede those of the optimizer's own class."""

    _hvdkit_reduce: Reduce

    @in_python
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the reduced gradients as (gradient, variable); minimize() calls it too; collective.

        Arguments as for tf.compat.v1.train.Optimizer.compute_gradients().
        """
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        variables = [variable for _, variable in pairs]
        reduced = self._hvdkit_reduce(variables, [gradient for gradient, _ in pairs])
        return list(zip(reduced, variables, strict=True))


def is_session_optimizer(optimizer: Any) -> bool:
    """Return whether it is an optimizer of tf.compat.v1.train."""
    return isinstance(optimizer, tf.compat.v1.train.Optimizer)


def distribute(
    optimizer: Any,
    *,
    compression: type[Compressor] | Coded,
    sparse_as_dense: bool,
    op: ReduceOp,
    gradient_predivide_factor: float,
    process_set: ProcessSet,
    unsupported: Mapping[str, bool],
) -> Any:
    """Make an optimizer of tf.compat.v1.train step on the gradients of all ranks, by a subclass of its own class.

    optimizer: to be wrapped.
    compression, sparse_as_dense, op, gradient_predivide_factor, process_set: as for DistributedGradientTape().
    unsupported: other arguments of hvdkit.tensorflow.DistributedOptimizer -> whether the user gave them.

    Raises ValueError for those, and what DistributedGradientTape() raises.
    """
    engine.runtime(_CALL)
    check_process_set(process_set, _CALL)
    given = [name for name, is_given in unsupported.items() if is_given]
    own = type(optimizer)
    if given:
        raise ValueError(
            f"{_CALL} got {given[0]} with {own.__name__}, an optimizer of tf.compat.v1.train. hvdkit has {given[0]} "
            f"for optimizers of tf.keras.optimizers only. Remove the argument, or use one of those."
        )
    distributed: Any = object.__new__(type(own.__name__, (_DistributedOptimizer, own), {"__module__": own.__module__}))
    distributed.__dict__.update(optimizer.__dict__)
    distributed._hvdkit_reduce = reduction(compression, sparse_as_dense, op, gradient_predivide_factor, process_set)
    return distributed


def broadcast_global_variables(root_rank: int) -> Any:
    """Make the operation that overwrites all variables of a graph for sessions with those of rank root_rank.

    Run it after the initializer. Raises RuntimeError in eager mode and in a tf.function, where TensorFlow keeps no list
    of all variables; for other errors see broadcast_variables().
    """
    if not in_session():
        raise RuntimeError(
            f"broadcast_global_variables({root_rank}) was called outside of a graph for tf.compat.v1.Session, where "
            f"TensorFlow keeps no list of all variables. Use hvd.broadcast_variables([*model.variables, "
            f"*optimizer.variables], root_rank={root_rank}) after the first step, or "
            f"hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank}) of hvdkit.keras in fit()."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts rank root_rank's variables at the start of tf.compat.v1.train.MonitoredTrainingSession and others.

    device: accepted as in Horovod, and ignored. Its errors: see broadcast_global_variables().
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._operation: Any = None

    def begin(self) -> None:
        """Make the operation, before the graph is finalized."""
        self._operation = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the operation after variables are initialized or restored."""
        session.run(self._operation)
