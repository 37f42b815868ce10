"""What is known while a tf.function is traced, and what cannot be in one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from hvdkit.errors import HorovodInternalError, XlaError

Function = TypeVar("Function", bound=Callable[..., Any])


def in_python(function: Function) -> Function:
    """Keep AutoGraph from rewriting a function that a tf.function calls, and all that it calls."""
    made: Function = tf.autograph.experimental.do_not_convert(function)
    return made


def check_not_compiled(call: str) -> None:
    """Raise if a function with jit_compile=True is being traced: XLA has no operation that leaves the program."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if type(context).__name__ == "XLAControlFlowContext":
                raise XlaError(
                    f"{call} was called in a function with jit_compile=True. XLA cannot compile communication between "
                    f"ranks. Compile the model alone (jit_compile=True on a function that computes loss and "
                    f"gradients) and call hvdkit outside of it; with Keras, use model.compile(jit_compile=False)."
                )
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)


def call_in_graph(function: Any, tensors: list[Any], dtypes: list[Any], name: str) -> Any:
    """An operation that calls `function` with numpy arrays each time the graph runs.

    function: is kept for ever, as TensorFlow keeps it; it gets arrays that share the tensors' memory, and TensorFlow
    shares the memory of the aligned arrays which it returns.
    Returns the list of its results, or the operation if there are none. Operations of one graph run in the order in
    which they are made. What it raises comes out of the graph as an error of TensorFlow's, see behind().
    """

    @functools.wraps(function)
    def noting(*arrays: Any) -> Any:
        try:
            return function(*arrays)
        except HorovodInternalError as error:
            _raised[:] = [error]
            raise

    with tf.device("CPU:0"):
        return tf.numpy_function(noting, tensors, dtypes, stateful=True, name=name)


#: What a graph's operation has raised last: of its error TensorFlow lets only the text through.
_raised: list[HorovodInternalError] = []


def behind(error: tf.errors.OpError) -> HorovodInternalError | None:
    """What hvdkit raised inside the graph that has failed with this error; None if it did not. It is told once."""
    found = _raised.pop() if _raised else None
    return found if found is not None and str(found) in (error.message or "") else None
