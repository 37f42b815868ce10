"""Information about the tf.function that is being traced, and calls of Python from graphs."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from hvdkit.errors import HorovodInternalError, NotInitializedError, XlaError
from hvdkit.tensorflow.errors import as_tensorflow_error, code_of

Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def in_python(function: Function) -> Function:
    """Keep AutoGraph from rewriting a function that a tf.function calls, and all that it calls.

    Its errors are errors of TensorFlow's as well, see as_tensorflow_error().
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with tensorflow_errors():
            return function(*args, **kwargs)

    made: Function = tf.autograph.experimental.do_not_convert(call)
    return made


@contextmanager
def tensorflow_errors() -> Iterator[None]:
    """Context that raises hvdkit's errors as errors of TensorFlow's as well, see as_tensorflow_error()."""
    try:
        yield
    except Exception as error:
        other = as_tensorflow_error(error)
        if other is error:
            raise
        raise other from error.__cause__


def in_session() -> bool:
    """Return whether the graph being built is for a tf.compat.v1.Session, rather than a tf.function of eager mode."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def is_unordered() -> bool:
    """Return whether TensorFlow will run the operations of the graph being built in any order.

    It does so for graphs for sessions, and for the functions that it makes for the gradients of functions, conditions
    and loops.
    """
    if in_session():
        return True
    graph = tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph"):
        if graph.name.startswith("__backward_") or type(graph).__name__ in _GRADIENT_GRAPHS:
            return True
        graph = graph.outer_graph
    return False


_GRADIENT_GRAPHS = ("_CondGradFuncGraph", "_WhileBodyGradFuncGraph")


def check_not_compiled(call: str) -> None:
    """Raise if a function with jit_compile=True is being traced: XLA cannot call out of the program."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if type(context).__name__ == "XLAControlFlowContext":
                raise XlaError(
                    f"{call} was called inside a tf.function with jit_compile=True. XLA cannot compile communication "
                    f"between ranks. Use jit_compile=True only for a function that computes loss and gradients, and "
                    f"call hvdkit outside of that function. With Keras, use model.compile(jit_compile=False)."
                )
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)


def check_nothing_dropped(names: Sequence[str], wanted: Collection[int], unused: Collection[int]) -> None:
    """Raise HorovodInternalError if other ranks have a gradient that this rank's graph was traced without.

    names: of all variables. wanted: gradients that the graph uses; unused: gradients that no rank has.
    """
    lost = sorted(set(range(len(names))) - set(wanted) - set(unused))
    if lost:
        raise HorovodInternalError(
            f"Other ranks have gradients of {', '.join(names[index] for index in lost[:3])}"
            f"{f' and {len(lost) - 3} more variables' if lost[3:] else ''} in this step, but the tf.function of "
            f"this rank was traced without them. Compute a gradient of every variable on every rank: "
            f"tape.gradient(..., unconnected_gradients=tf.UnconnectedGradients.ZERO)."
        )


def call_on_device(function: Any, tensors: Sequence[Any], dtypes: Sequence[Any], name: str) -> list[Any]:
    """Make an operation on the current device that calls `function` with eager tensors there each time the graph runs.

    function: kept as long as the graph; returns a list of eager tensors, of these dtypes.
    tensors: its arguments.
    dtypes: of its results.
    name: of the operation.

    Operations of one tf.function run in the order in which they are made. One that runs again before it is done waits.
    The function's errors leave the graph as TensorFlow's UNKNOWN, see behind().
    """
    running = threading.Lock()

    def call(*given: Any) -> Any:
        try:
            with running:
                return function(*given)
        except HorovodInternalError as error:
            _note(error)
            raise

    results = tf.py_function(call, [tf.stop_gradient(one) for one in tensors], list(dtypes), name=name)
    return list(results) if dtypes else []


def call_in_graph(
    function: Any, tensors: list[Any], dtypes: list[Any], name: str, *, coded_errors: bool = False
) -> Any:
    """Make an operation that calls `function` with numpy arrays each time the graph runs.

    function: kept for ever, as TensorFlow keeps it; its arrays share the tensors' memory, and TensorFlow shares the
    memory of aligned arrays that it returns.
    tensors: its arguments.
    dtypes: of its results.
    name: of the operation.
    coded_errors: raise the function's errors with the code of code_of(), which costs about 100 us a run; else
    ValueError and TypeError become INVALID_ARGUMENT, others UNKNOWN. They leave the graph as errors of TensorFlow's,
    see behind().

    Returns the list of its results, or the operation if it has none. Operations of one tf.function run in the order
    in which they are made, those of a graph that is_unordered() in any order, at the same time. One that runs again
    before it is done, as in a loop, waits.
    """
    unordered = is_unordered()
    checked = unordered or coded_errors
    running = threading.Lock()

    @functools.wraps(function)
    def call(*arrays: Any) -> Any:
        try:
            with running:
                results = function(*arrays)
        except (HorovodInternalError, NotInitializedError) as error:
            if isinstance(error, HorovodInternalError):
                _note(error)
            if not checked or code_of(error) != tf.errors.FAILED_PRECONDITION:
                raise
            return [*(np.empty(0, tf.as_dtype(dtype).as_numpy_dtype) for dtype in dtypes), _path_of(error)]
        return [*results, _NO_ERROR] if checked else results

    with tf.device("CPU:0"):
        if not checked:
            return tf.numpy_function(call, tensors, dtypes, stateful=True, name=name)
        make = _call_in_thread if unordered else _call_in_turn
        *results, path = make(call, tensors, [*dtypes, tf.string], name)
        nothing = tf.io.read_file(path, name=f"{name}_error")
        # An operation without state and used results would be optimized away.
        with tf.control_dependencies([tf.raw_ops.Assert(condition=True, data=[nothing])]):
            return [tf.identity(one) for one in results] if results else tf.no_op()


#: TensorFlow has no operation that fails with FAILED_PRECONDITION and a text of run time, and numpy_function cannot do
#: so either. Reading a file whose path goes through a file that is not a folder does it (errno ENOTDIR).
_NO_ERROR = "/dev/null"
_PATH_BYTES = 3500  # of the text; a path has 4095


def _path_of(error: Exception) -> bytes:
    text = str(error).encode()[:_PATH_BYTES].replace(b"\0", b" ")
    return b"/dev/null/hvdkit: " + text + b" (TensorFlow has no better words for a failed precondition than these:)"


def _call_in_turn(function: Any, tensors: Sequence[Any], dtypes: Sequence[Any], name: str) -> list[Any]:
    """Call it in one of the compute threads; such operations run one by one, see call_in_graph()."""
    return list(tf.numpy_function(function, list(tensors), list(dtypes), stateful=True, name=name))


def _call_in_thread(function: Any, tensors: Sequence[Any], dtypes: Sequence[Any], name: str) -> list[Any]:
    """Call it in a thread of the operation's own.

    For graphs that are unordered, see is_unordered(). Operations that wait for other ranks would occupy all compute
    threads, with different operations on each rank. An operation that reads a dataset has its own thread; this one
    reads a dataset of a single element, the function's results.
    """
    given = list(tensors) or [tf.constant(0)]  # an empty dataset has no element
    shapes = [tf.TensorShape(None)] * len(dtypes)

    def body(*arrays: Any) -> list[Any]:
        return _call_in_turn(function, arrays[: len(tensors)], dtypes, name)

    traced = tf.function(body, autograph=False).get_concrete_function(
        *[tf.TensorSpec(one.shape, one.dtype) for one in given]
    )
    dataset = tf.raw_ops.MapDataset(
        input_dataset=tf.raw_ops.TensorDataset(components=given, output_shapes=[one.shape for one in given]),
        other_arguments=[],
        f=traced,
        output_types=list(dtypes),
        output_shapes=shapes,
        use_inter_op_parallelism=False,
    )
    return list(
        tf.raw_ops.DatasetToSingleElement(dataset=dataset, output_types=list(dtypes), output_shapes=shapes, name=name)
    )


#: The newest errors of graphs' operations that behind() has not found yet: TensorFlow passes on only the text of an
#: error.
_raised: deque[HorovodInternalError] = deque(maxlen=64)
_noting = threading.Lock()


def _note(error: HorovodInternalError) -> None:
    with _noting:
        for other in _raised:
            other.__traceback__ = None  # its frames hold gradients
        _raised.append(error)


def raise_what_failed(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Raise HorovodInternalError from a function in which a collective fails inside a graph.

    There the error is one of TensorFlow's.
    """

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except HorovodInternalError:
            raise  # in eager mode they are errors of TensorFlow's as well
        except tf.errors.OpError as error:
            if (found := behind(error)) is not None:
                raise found from error
            if isinstance(error, tf.errors.UnknownError) and "Horovod" in error.message:  # from Horovod's core
                raise HorovodInternalError(error.message) from error
            raise

    return call


def behind(error: tf.errors.OpError) -> HorovodInternalError | None:
    """Find hvdkit's error that made the graph fail with this error, by its text; None if hvdkit raised none.

    Each error is found once.
    """
    with _noting:
        fitting = [one for one in _raised if (text := _text_of(one)) and text in (error.message or "")]
        found = max(fitting, key=lambda one: len(str(one)), default=None)  # one text may be a part of another
        if found is not None:
            _raised.remove(found)
        return found


def _text_of(error: Exception) -> str:
    return str(error).encode()[:_PATH_BYTES].replace(b"\0", b" ").decode(errors="ignore")
