"""The operations of a reduction: Average, Sum and others."""

from __future__ import annotations


class ReduceOp:
    """A reduction operation; compared by identity. kind: its name inside the engine."""

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


def choose_op(average: bool | None, op: ReduceOp | None, call: str = "") -> ReduceOp:
    """Choose the operation from `op` or Horovod's older argument `average`; Average if neither is given.

    call: the public function, for messages. Raises ValueError if both are given, TypeError if `op` is no ReduceOp.
    """
    place = f"{call}: " if call else ""
    if average is not None and op is not None:
        raise ValueError(f"{place}average={average} and op={op} were both given. Pass only op.")
    if op is None:
        return Sum if average is False else Average
    if not isinstance(op, ReduceOp):
        raise TypeError(f"{place}op is {op!r}; use hvd.Average, Sum, Adasum, Min, Max or Product.")
    return op
