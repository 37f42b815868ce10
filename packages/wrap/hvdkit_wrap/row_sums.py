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

    line: of the product. function: first and last line of the function around it. factor: the other factor.
    """

    line: int
    function: tuple[int, int]
    factor: ast.expr


def find_product(frame: FrameType, rows: int) -> int:
    """Find a product of loss.item() and the number of rows of this rank; returns its line, 0 if none is found.

    frame: of the script, where item() is called. rows: this rank's rows of the batch.
    """
    for product in _read_products(frame.f_code.co_filename):
        if not product.function[0] <= frame.f_lineno <= product.function[1]:
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
    """List the products in a script, without those whose count is summed too: then the script divides by that sum."""
    nodes = list(ast.walk(tree))
    functions = [(one.lineno, one.end_lineno or one.lineno) for one in nodes if isinstance(one, ast.FunctionDef)]
    losses = {
        target.id
        for one in nodes
        if isinstance(one, ast.Assign) and _is_item(one.value)
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    summed = {ast.dump(one.value) for one in nodes if isinstance(one, ast.AugAssign)}
    for one in nodes:
        if not (isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mult)):
            continue
        for loss, count in ((one.left, one.right), (one.right, one.left)):
            is_loss = _is_item(loss) or (isinstance(loss, ast.Name) and loss.id in losses)
            if is_loss and _is_plain(count) and ast.dump(count) not in summed:
                around = [each for each in functions if each[0] <= one.lineno <= each[1]]
                yield Product(one.lineno, max(around, default=(1, 10**9)), count)


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
