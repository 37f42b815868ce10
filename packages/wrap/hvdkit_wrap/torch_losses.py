"""Find out from autograd's graph whether a loss is a mean or a sum over the rows of its batch."""

from __future__ import annotations

from typing import Any

MEAN, SUM, FIXED = "mean", "sum", "fixed"

#: Operations after a reduction whose result is still that reduction, times a constant.
_LINEAR = ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "Squeeze", "Unsqueeze", "View", "Reshape", "Clone", "Alias")
#: The only operations in a penalty on weights; a term that depends on the batch has other operations too.
_PENALTY = ("Sum", "Pow", "Abs", "Mul", "Norm", "LinalgVectorNorm", "Sqrt", "Add", "Div", "View", "Stack", "torch")
_MOST = 200  # nodes to visit


def kinds_of(loss: Any, *, rows: int, whole: int) -> set[str]:
    """Return the kinds of a loss's terms: MEAN, SUM, and FIXED for penalties on weights.

    rows: of the batch on this rank. whole: on all ranks. They distinguish the divisor of a mean from a constant.
    Empty if the kinds are unknown: an operation other than a sum or a product with a constant follows the reduction,
    or the script defines the reduction itself.
    """
    kinds: set[str] = set()
    first = getattr(loss, "grad_fn", None)
    todo: list[tuple[Any, tuple[Any, ...]]] = [(first, ())] if first is not None else []
    looked = 0
    while todo:
        node, divisors = todo.pop()
        looked += 1
        kind = _kind(node)
        if kind is not None:
            if kind == SUM:
                kind = _divided(node, divisors, rows, whole)
                if kind is None:
                    return set()
            kinds.add(kind)
            continue
        inputs = [one for one, _ in node.next_functions if one is not None]
        products = _is(node, ("Mul", "Div")) and len(inputs) > 1
        if looked > _MOST or products or not _is(node, _LINEAR):
            return set()
        if _is(node, ("Div",)):
            divisors = (*divisors, _saved(node, "_saved_other"))
        todo += [(one, divisors) for one in inputs]
    return kinds


def _divided(node: Any, divisors: tuple[Any, ...], rows: int, whole: int) -> str | None:
    """Classify a sum by its divisors.

    MEAN if a divisor is a multiple of this rank's rows, and not of the whole batch's. SUM if the sum has no divisors,
    or all are multiples of the whole batch's rows. None if the kind is unknown.
    """
    numbers = [float(one) for one in divisors if isinstance(one, (int, float)) or getattr(one, "numel", int)() == 1]
    if any(number and number % rows == 0 and number % whole for number in numbers):
        return MEAN
    return SUM if all(not number % whole for number in numbers) and len(numbers) == len(divisors) else None


def _keeps_weights(node: Any) -> bool:
    return "NllLoss" in str(node.name())


def leaves_out(loss: Any) -> bool:
    """Is the loss a cross entropy with class weights or with ignored targets?"""
    node = loss.grad_fn
    while node is not None and not _keeps_weights(node):
        node = node.next_functions[0][0] if node.next_functions and _is(node, _LINEAR) else None
    if node is None or node._saved_reduction != 1:
        return False
    total, target = _saved(node, "_saved_total_weight"), _saved(node, "_saved_target")
    return total is not None and target is not None and bool(float(total) != float(target.numel()))


def _saved(node: Any, name: str) -> Any:
    """Return a value that autograd saved for an operation; None if it did not, or the backward pass has freed it."""
    try:
        return getattr(node, name, None)
    except RuntimeError:
        return None


def _is(node: Any, words: tuple[str, ...]) -> bool:
    return any(node.name().startswith(word) for word in words)


def _kind(node: Any) -> str | None:
    """Return MEAN, SUM, or FIXED if the node does not depend on the batch; None if it is not a reduction."""
    reduction = _saved(node, "_saved_reduction")
    if reduction in (1, 2):
        return MEAN if reduction == 1 else SUM
    if _is(node, ("Mean",)):
        return MEAN
    if _is_penalty(node):
        return FIXED
    if _is(node, ("Sum",)):
        return SUM
    return None


def _is_penalty(node: Any) -> bool:
    todo, looked = [node], 0
    while todo:
        one = todo.pop()
        if one is None:
            continue
        looked += 1
        if looked > _MOST or not _is(one, _PENALTY):
            return False
        todo += [other for other, _ in one.next_functions]
    return True
