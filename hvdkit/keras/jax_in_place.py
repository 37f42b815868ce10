"""Calls of Python from a compiled JAX program, which work in XLA's own memory.

jax.experimental.io_callback copies the arguments and results of a callback to new memory each time.
jax.experimental.buffer_callback passes the memory itself. It is experimental, as io_callback is.
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


class OrderedCall:
    """A function of numpy arrays that a program calls each time it runs, in order with all such calls.

    work: gets the arrays to read and, in a second list, the arrays to fill. Without `kinds` both have the same
    shapes and dtypes, and share their memory if XLA can arrange that. The owner must keep this object as long as
    programs run.
    """

    def __init__(self, work: Callable[[list[Array], list[Array]], None]) -> None:
        self._work, self._in_place = work, InPlace(work)

    def __call__(self, arrays: Sequence[Any], kinds: Sequence[jax.ShapeDtypeStruct] | None = None) -> list[Any]:
        """Return the results of `work`, as values of the program being traced. kinds: of the results."""
        if not works():
            shapes = list(map(_kind, arrays)) if kinds is None else list(kinds)
            work = functools.partial(self._with_copies, shapes)
            copied: list[Any] = io_callback(work, shapes, *arrays, ordered=True)
            return copied
        return _in_order([self._in_place], [arrays], kinds)

    def _with_copies(self, kinds: Sequence[jax.ShapeDtypeStruct], *arrays: Any) -> list[Array]:
        sources = [np.asarray(array) for array in arrays]
        results = [np.empty(kind.shape, kind.dtype) for kind in kinds]
        self._work(sources, results)
        return results


class OrderedCalls:
    """Functions of numpy arrays that a program calls one after the other, each when the arrays that it reads are ready.

    They are in order with all ordered calls. works: each gets the arrays to read and, in a second list, the arrays that
    all of them fill, which do not move until the last one has returned. Requires works().
    """

    def __init__(self, works: Sequence[Callable[[list[Array], list[Array]], None]]) -> None:
        self._calls = [InPlace(work if not number else _keeping(work)) for number, work in enumerate(works)]

    def __call__(self, arrays: Sequence[Sequence[Any]], kinds: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
        """Return the filled arrays. arrays: those that each function reads; they are freed after their last reader."""
        return _in_order(self._calls, arrays, kinds)


def _in_order(
    calls: Sequence[InPlace], arrays: Sequence[Sequence[Any]], kinds: Sequence[jax.ShapeDtypeStruct] | None
) -> list[Any]:
    # The calls themselves are unordered, so they go between two ordered ones.
    after = io_callback(_begin, jax.ShapeDtypeStruct((), np.int32), ordered=True)
    results: list[Any] = []
    for call, given in zip(calls, arrays, strict=True):
        results, after = call([*results, *given], after, kinds, kept=len(results))
    io_callback(_end, None, after, ordered=True)
    return results


def _keeping(work: Callable[[list[Array], list[Array]], None]) -> Callable[[list[Array], list[Array]], None]:
    """Check that the results of earlier calls have not moved, and pass `work` the arrays after them."""

    def keep(arrays: list[Array], results: list[Array]) -> None:
        for before, now in zip(arrays, results, strict=False):
            check_in_place(address_of(before), now)
        work(arrays[len(results) :], results)

    return keep


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


def _begin() -> Array:
    return np.zeros((), np.int32)


def _end(_: Any) -> None:
    pass


class BufferCall:
    """A function of XLA's own memory that a program calls each time it runs, unordered.

    work: gets XLA's context of the call, the buffers to read and, in a second list, the buffers to fill. Without
    `kinds` both have the same shapes and dtypes, and share their memory if XLA can arrange that. The owner must keep
    this object as long as programs run.
    """

    def __init__(self, work: Callable[[Any, Sequence[Any], Sequence[Any]], None]) -> None:
        self.work = work
        # One object for all calls: JAX caches compilations outside of jit by it. It must not keep `self` alive.
        self._callback = functools.partial(_run, weakref.ref(self))

    def __call__(
        self, arrays: Sequence[Any], after: Any, kinds: Sequence[jax.ShapeDtypeStruct] | None = None, *, kept: int = 0
    ) -> tuple[list[Any], Any]:
        """Return the results of `work`, and a scalar that is ready after it.

        arrays: for `work` to read.
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
    """A BufferCall on the CPU; work: gets numpy arrays; see OrderedCall."""

    def __init__(self, work: Callable[[list[Array], list[Array]], None]) -> None:
        def work_on_arrays(_: Any, buffers: Sequence[Any], results: Sequence[Any]) -> None:
            work([np.asarray(buffer) for buffer in buffers], [np.asarray(result) for result in results])

        super().__init__(work_on_arrays)


def _run(owner: weakref.ref[BufferCall], context: Any, results: Sequence[Any], *buffers: Any) -> None:
    call = owner()
    if call is None:
        raise HorovodInternalError(
            "The DistributedOptimizer that this training step was compiled with no longer exists. Keep a reference to "
            "the optimizer."
        )
    call.work(context, buffers[:-1], results[:-1])
