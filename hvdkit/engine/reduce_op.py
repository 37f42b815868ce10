"""The operations of a reduction: Average, Sum and others."""

from __future__ import annotations


class ReduceOp:
    """An operation; compared by identity, printed by name. kind: the engine's word for it."""

    def __init__(self, name: str) -> None:
        self.name, self.kind = name, name.lower()

    def __repr__(self) -> str:
        return f"hvd.{self.name}"

    def __reduce__(self) -> str:
        return self.name  # stays the same object when it is pickled or copied


Average = ReduceOp("Average")
Sum = ReduceOp("Sum")
Adasum = ReduceOp("Adasum")
Min = ReduceOp("Min")
Max = ReduceOp("Max")
Product = ReduceOp("Product")


def choose_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """Horovod's two ways to say what is done: `op`, or the older `average`; Average if neither is given.

    Raises ValueError for both at once, TypeError for something that is no op.
    """
    if average is not None and op is not None:
        raise ValueError(f"average={average} and op={op} say the same thing twice; give only op.")
    if op is None:
        return Sum if average is False else Average
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op is {op!r}; use hvd.Average, Sum, Adasum, Min, Max or Product.")
    return op
