"""Find sums of loss.item() times the rows of a batch: the loss is of the whole batch, the rows are of one rank."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

#: The syntax nodes of an operand whose second evaluation has no side effect.
_PLAIN = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Call, ast.Load)
_COUNTS = ("len", "size")


class Product(NamedTuple):
    """A product of loss.item() and another factor.

    line: of the product. calls: first and last lines of the calls of item(). factor: the other factor.
    """

    line: int
    calls: tuple[tuple[int, int], ...]
    factor: ast.expr


def find_product(frame: FrameType, rows: int) -> int:
    """Find a product of loss.item() and the number of rows of this rank; returns its line, 0 if none is found.

    frame: of the script, where item() is called. rows: this rank's rows of the batch.
    """
    for product in _read_products(frame.f_code.co_filename):
        if not any(first <= frame.f_lineno <= last for first, last in product.calls):
            continue
        try:
            value = _evaluate(product.factor, frame)
        except Exception:  # a name that is not set yet, or an operand of another kind
            continue
        if type(value) is int and value == rows:
            return product.line
    return 0


@functools.cache
def _read_products(file: str) -> tuple[Product, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(_list_products(tree))


def _list_products(tree: ast.Module) -> Iterator[Product]:
    """List the products in a script, without those whose sum is divided by the sum of the same counts."""
    functions = [one for one in ast.walk(tree) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for scope in (tree, *functions):
        nodes = list(_walk(scope))
        losses: dict[str, list[ast.expr]] = {}
        for one in nodes:
            if isinstance(one, ast.Assign) and _is_item(one.value):
                for target in one.targets:
                    losses.setdefault(ast.unparse(target), []).append(one.value)
        sums, divisions = _list_sums(nodes), _list_divisions(nodes)
        for one in nodes:
            if not (isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mult)):
                continue
            for loss, count in ((one.left, one.right), (one.right, one.left)):
                calls = [loss] if _is_item(loss) else losses.get(ast.unparse(loss), [])
                if calls and _is_plain(count) and not _is_divided_by_counts(one, count, sums, divisions):
                    lines = tuple((call.lineno, call.end_lineno or call.lineno) for call in calls)
                    yield Product(one.lineno, lines, count)


def _walk(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module or function, without those of the functions in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from _walk(child)


def _is_divided_by_counts(
    product: ast.expr, count: ast.expr, sums: list[tuple[str, ast.expr]], divisions: list[tuple[str, ast.expr]]
) -> bool:
    """Is `count` summed too, and does each division of the sum of the products have that sum in its divisor?

    A sum that is not divided in this function may be divided by the counts elsewhere.
    """
    counters = {target for target, value in sums if ast.unparse(value) == ast.unparse(count)}
    totals = {target for target, value in sums if any(one is product for one in ast.walk(value))}
    divisors = [divisor for total, divisor in divisions if total in totals]
    named = [{ast.unparse(one) for one in ast.walk(divisor) if isinstance(one, ast.expr)} for divisor in divisors]
    return bool(counters) and all(names & counters for names in named)


def _list_sums(nodes: list[ast.AST]) -> list[tuple[str, ast.expr]]:
    """List (target, value) of target += value and of target = target + value."""
    sums: list[tuple[str, ast.expr]] = []
    for one in nodes:
        if isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Add):
            sums.append((ast.unparse(one.target), one.value))
        elif isinstance(one, ast.Assign) and isinstance(one.value, ast.BinOp) and isinstance(one.value.op, ast.Add):
            target, left, right = ast.unparse(one.targets[0]), one.value.left, one.value.right
            sums += [(target, new) for old, new in ((left, right), (right, left)) if ast.unparse(old) == target]
    return sums


def _list_divisions(nodes: list[ast.AST]) -> list[tuple[str, ast.expr]]:
    """List (dividend, divisor) of dividend / divisor and of dividend /= divisor."""
    divisions: list[tuple[str, ast.expr]] = []
    for one in nodes:
        if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div):
            divisions.append((ast.unparse(one.left), one.right))
        elif isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Div):
            divisions.append((ast.unparse(one.target), one.value))
    return divisions


def _evaluate(node: ast.expr, frame: FrameType) -> Any:
    """Evaluate names, attributes, subscripts, constants, len() and size() in a frame. Raises their exceptions."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals[node.id] if node.id in frame.f_locals else frame.f_globals[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(_evaluate(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return _evaluate(node.value, frame)[_evaluate(node.slice, frame)]
    assert isinstance(node, ast.Call)
    function = len if isinstance(node.func, ast.Name) else _evaluate(node.func, frame)
    return function(*(_evaluate(one, frame) for one in node.args))


def _is_item(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item"


def _is_plain(node: ast.expr) -> bool:
    return all(
        isinstance(one, _PLAIN) and (not isinstance(one, ast.Call) or _name(one.func) in _COUNTS)
        for one in ast.walk(node)
    )


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
