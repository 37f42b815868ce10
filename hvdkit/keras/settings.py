"""Settings of the gradient reduction of a wrapped optimizer, on all backends."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from hvdkit.engine.allreduce import AllReduce
from hvdkit.engine.api import Engine
from hvdkit.engine.compression import Coded
from hvdkit.engine.groups import Group, ProcessSet, check_process_set
from hvdkit.engine.named.submit import all_true
from hvdkit.engine.reduce_op import Average, ReduceOp
from hvdkit.engine.request import ReduceOptions, check_gradient, gradient_options
from hvdkit.engine.strategy import Strategy, refuse_contradictions
from hvdkit.keras.compression import Compressor


class _StepName:
    """Name for the agreements of an optimizer: a counter of this world, in the order of first steps.

    A counter of the process would differ on a rank that has wrapped more optimizers than others.
    """

    def __init__(self) -> None:
        self._engine: weakref.ref[Engine] | None = None
        self._name = ""

    def get(self, engine: Engine) -> str:
        """Return the name, the same on all ranks of the engine; the first call in a world is collective."""
        if self._engine is None or self._engine() is not engine:
            self._engine, self._name = weakref.ref(engine), f"step of optimizer {engine.count('agreement')}"
        return self._name


@dataclass(frozen=True)
class OptimizerSettings:
    """Arguments of one DistributedOptimizer; see there. Raises ValueError or TypeError for invalid values."""

    compression: type[Compressor] | Coded
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet
    strategy: Strategy | None = None
    _step_name: _StepName = field(default_factory=_StepName, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_process_set(self.process_set, "DistributedOptimizer()")
        gradient_options(self.op, self.predivide, self.compression)
        if self.strategy is not None:
            others = {
                "op": self.op is not Average,
                "gradient_predivide_factor": self.predivide != 1.0,
                "compression": self.options.wire != "none",
            }
            refuse_contradictions(self.strategy, others)

    def make_strategy(self) -> Strategy:
        """Return the user's strategy, the same object each time, or a new AllReduce."""
        return AllReduce(self.options) if self.strategy is None else self.strategy

    def check(self, variables: Sequence[Any]) -> None:
        """Raise TypeError for a trained variable that the strategy cannot train."""
        strategy = self.make_strategy()
        for variable in variables:
            strategy.check(f"the variable {_path(variable)}", keras.backend.standardize_dtype(variable.dtype))

    @property
    def options(self) -> ReduceOptions:
        """The settings as the engine's ReduceOptions."""
        return gradient_options(self.op, self.predivide, self.compression)

    @property
    def group(self) -> Group:
        """The ranks that train together, as a group."""
        return self.process_set.group("DistributedOptimizer()")

    def agree(self, flag: Any) -> bool:
        """Return whether the flag is true on all ranks; collective."""
        group = self.group
        return all_true(group, bool(flag), self._step_name.get(group.engine))

    @property
    def size(self) -> int:
        """The number of ranks that train together; 1 on a rank outside of the process set."""
        return self.process_set.size() if self.process_set.included() else 1


def check_variables(variables: Sequence[Any]) -> None:
    """Raise TypeError for a trained variable whose gradients cannot be summed."""
    for variable in variables:
        check_gradient(f"the variable {_path(variable)}", keras.backend.standardize_dtype(variable.dtype))


def check_shape(name: str, shape: Sequence[int], of_variable: Sequence[int]) -> None:
    """Raise ValueError unless a gradient has the shape of its variable."""
    if tuple(shape) != tuple(of_variable):
        raise ValueError(f"The gradient of {name} has shape {tuple(shape)}, but the variable has {tuple(of_variable)}.")


def name_variables(variables: Sequence[Any]) -> list[str]:
    """Return a name for each variable, for errors and for the comparison between ranks.

    Keras numbers layers in the order in which a process makes them, so "dense_3" on one rank may be "dense_1" on
    another that has made fewer models, and names of a loaded model lack "sequential/". So the result contains the index
    in the list and the layer's name without its number, but no outer names. Raises as check_variables does.
    """
    check_variables(variables)
    return [f"{index} {_without_numbers(_path(variable))}" for index, variable in enumerate(variables)]


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))


def _without_numbers(path: str) -> str:
    parts = []
    for part in path.split("/")[-2:]:
        name, _, number = part.rpartition("_")
        parts.append(name if name and number.isdigit() else part)
    return "/".join(parts)
