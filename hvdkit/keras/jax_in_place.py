"""Calls of Python from a compiled JAX program, which work in XLA's own memory.

jax.experimental.io_callback copies the arguments and results of a callback to new memory each time.
jax.experimental.buffer_callback passes the memory itself. It is experimental, as io_callback is.

Functions named trace run while JAX traces a program: they add a call to it, once. Functions named run are what the
program calls, each time it runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from hvdkit.errors import HorovodInternalError
from hvdkit.transport.buffer import Array

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:  # JAX before 0.6, see works()
    buffer_callback = None  # type: ignore[assignment]


def has_call() -> bool:
    """Return whether this JAX has such a call."""
    return buffer_callback is not None


def works() -> bool:
    """Return whether this JAX has such a call, and programs run on the CPU by default."""
    return has_call() and jax.default_backend() == "cpu"


def trace_in_order(
    calls: Sequence[InPlace], arrays: Sequence[Sequence[Any]], kinds: Sequence[jax.ShapeDtypeStruct] | None = None
) -> list[Any]:
    """Add calls to the program being traced, one after the other, in order with all such calls; return their results.

    calls: each is executed when the arrays that it reads are ready. The owner must keep them as long as programs run.
        Several calls fill the same results, which do not move until the last one has returned: all but the first are of
        keep_results(), and works() is true.
    arrays: those that each call reads; they are freed after their last reader.
    kinds: of the results. Without them, for one call, the results have the shapes and dtypes of its arrays, and share
        their memory if XLA can arrange that.
    """
    if not works():
        (call,), (given,) = calls, arrays
        shapes = list(map(_kind, given)) if kinds is None else list(kinds)
        copied: list[Any] = io_callback(functools.partial(call.run_on_copies, shapes), shapes, *given, ordered=True)
        return copied
    # The calls themselves are unordered, so they go between two ordered ones.
    after = io_callback(_run_begin, jax.ShapeDtypeStruct((), np.int32), ordered=True)
    results: list[Any] = []
    for call, given in zip(calls, arrays, strict=True):
        results, after = call.trace([*results, *given], after, kinds, kept=len(results))
    io_callback(_run_end, None, after, ordered=True)
    return results


def keep_results(run: Callable[[list[Array], list[Array]], None]) -> Callable[[list[Array], list[Array]], None]:
    """Return the function of a later call of trace_in_order(), which gets the results of earlier calls as well.

    The returned function checks that these have not moved, and passes `run` the arrays after them.
    """

    def run_after_check(arrays: list[Array], results: list[Array]) -> None:
        for before, now in zip(arrays, results, strict=False):
            check_in_place(address_of(before), now)
        run(arrays[len(results) :], results)

    return run_after_check


def address_of(array: Array) -> int:
    """Return the address of the array's memory."""
    address: int = array.__array_interface__["data"][0]
    return address


def check_in_place(address: int, now: Array) -> None:
    """Raise HorovodInternalError unless an array still has the address of an earlier call of the step."""
    if now.size and address != address_of(now):
        raise HorovodInternalError(
            "XLA has moved the memory of a reduction that was under way, so that this step's results are wrong. Please "
            "report this with the version of JAX. To do without, leave out shard."
        )


def _kind(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _run_begin() -> Array:
    return np.zeros((), np.int32)


def _run_end(_: Any) -> None:
    pass


class BufferCall:
    """A function of XLA's own memory that a program calls each time it runs, unordered.

    run: gets XLA's context of the call, the buffers to read and, in a second list, the buffers to fill. Without
        `kinds` both have the same shapes and dtypes, and share their memory if XLA can arrange that. The owner must
        keep this object as long as programs run.
    """

    def __init__(self, run: Callable[[Any, Sequence[Any], Sequence[Any]], None]) -> None:
        self.run = run
        # One object for all calls: JAX caches compilations outside of jit by it. It must not keep `self` alive.
        self._callback = functools.partial(_run, weakref.ref(self))

    def trace(
        self, arrays: Sequence[Any], after: Any, kinds: Sequence[jax.ShapeDtypeStruct] | None = None, *, kept: int = 0
    ) -> tuple[list[Any], Any]:
        """Add the call to the program being traced; return the results of `run`, and a scalar that is ready after it.

        arrays: for `run` to read.
        after: a scalar that must be ready before.
        kinds: of the results.
        kept: number of results that share the memory of the first arrays.
        """
        inputs = [*arrays, after]
        results_of = [*(map(_kind, arrays) if kinds is None else kinds), _kind(after)]
        aliases = {index: index for index in range(len(arrays) if kinds is None else kept)}
        aliases[len(arrays)] = len(results_of) - 1
        call = buffer_callback(self._callback, results_of, has_side_effect=True, input_output_aliases=aliases)
        *results, done = call(*inputs)
        return results, done


class InPlace(BufferCall):
    """A BufferCall on the CPU.

    run: gets the arrays to read and, in a second list, the arrays to fill, as numpy arrays; see BufferCall.
    """

    def __init__(self, run: Callable[[list[Array], list[Array]], None]) -> None:
        def run_on_arrays(_: Any, buffers: Sequence[Any], results: Sequence[Any]) -> None:
            run([np.asarray(buffer) for buffer in buffers], [np.asarray(result) for result in results])

        super().__init__(run_on_arrays)

    def run_on_copies(self, kinds: Sequence[jax.ShapeDtypeStruct], *arrays: Any) -> list[Array]:
        """Execute `run` where XLA's memory cannot be had: on copies of the arrays, and into new memory."""
        results = [np.empty(kind.shape, kind.dtype) for kind in kinds]
        self.run(None, arrays, results)
        return results


def _run(owner: weakref.ref[BufferCall], context: Any, results: Sequence[Any], *buffers: Any) -> None:
    call = owner()
    if call is None:
        raise HorovodInternalError(
            "The DistributedOptimizer that this training step was compiled with no longer exists. Keep a reference to "
            "the optimizer."
        )
    call.run(context, buffers[:-1], results[:-1])
