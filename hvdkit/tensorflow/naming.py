"""Names of operations in graphs, which are given while the graph is built, and are equal on all ranks.

A graph's operations run in any order, so that order cannot name them. They are named by the function or graph in which
they are made, and by their number among hvdkit's operations of the kind and process set there. Neither other operations
of the graph count, nor how often the function was traced: both may differ between ranks.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from hvdkit.engine.groups import ProcessSet, check_process_set
from hvdkit.tensorflow.tracing import in_session

#: Graph -> number of uses of each name; and the bodies of its control flow by TensorFlow's names.
_counts: weakref.WeakKeyDictionary[Any, Counter[tuple[Any, ...]]] = weakref.WeakKeyDictionary()
_bodies: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()

_NUMBERED = re.compile(r"_\d+$")
_BRANCH = re.compile(r"_(true|false|(indexed_case_)?branch\d+)$")
_CONTROL_FLOW = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")


def operation_name(kind: str, name: str | None, process_set: ProcessSet) -> str | None:
    """Name an operation while it is made; in eager mode the user's name, or None to use the order of calls.

    kind: the engine's word. In a graph for sessions operations of one name may run at the same time, so a user's name
    gets a number from its second use on; inside a tf.function they run one after the other. Raises TypeError
    for an object that is not a process set.
    """
    check_process_set(process_set, f"{kind}()")
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    if name is None:
        return f"graph.{place(graph)}{count(graph, kind, process_set, None)}"
    if not in_session():
        return name
    return _numbered(name, count(graph, kind, process_set, name))


def gradient_name(kind: str, forward_kind: str, forward: str | None, process_set: ProcessSet) -> str | None:
    """Name the operation of this kind in the gradient of another; None in eager mode.

    kind: of the operation in the gradient.
    forward_kind: kind of the other.
    forward: name of the other, from operation_name(). TensorFlow decides in which order gradients are made.
    process_set: the ranks that take part.
    """
    if tf.executing_eagerly() or forward is None:
        return operation_name(kind, None, process_set)
    name = f"{forward}.{forward_kind}_gradient"
    return _numbered(name, count(tf.compat.v1.get_default_graph(), kind, process_set, name))


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}.{number}"


def count(graph: Any, kind: str, process_set: ProcessSet, name: Hashable) -> int:
    """Count the uses of a name in this graph, including this one."""
    key = (kind, tuple(process_set.ranks or ()), name)
    counter = _counts.setdefault(graph, Counter())
    counter[key] += 1
    return counter[key]


def place(graph: Any) -> str:
    """Name the position in a function or graph, as words each followed by a dot; equal for branches of a condition.

    A function has its own name, independent of callers: TensorFlow traces it once for all callers.
    """
    parts: list[str] = []
    while hasattr(graph, "outer_graph"):
        kind, plain = type(graph).__name__, _NUMBERED.sub("", graph.name)
        if kind not in _CONTROL_FLOW:
            of_user = kind == "FuncGraph" and not graph.name.startswith("__")  # a number in a user's name belongs to it
            parts.append(graph.name if of_user else plain)
            break
        bodies = _bodies.setdefault(graph.outer_graph, {})
        number = bodies.setdefault(_BRANCH.sub("", plain), len(bodies) + 1)
        parts.append(f"{'cond' if _BRANCH.search(plain) else 'loop'}{number}")
        graph = graph.outer_graph
    return "".join(f"{part}." for part in reversed(parts))
