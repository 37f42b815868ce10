"""A call from a compiled JAX program that works in XLA's own memory, on the CPU.

jax.experimental.io_callback copies what goes into the callback and what comes out of it, into fresh memory each time.
jax.experimental.buffer_callback gives the memory itself. It is experimental, as io_callback is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hvdkit.errors import HorovodInternalError
from hvdkit.transport.buffer import Array

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:  # JAX before 0.6, see works()
    buffer_callback = None  # type: ignore[assignment]


def works() -> bool:
    """Has this JAX such a call, and is the CPU where programs run by default?"""
    return buffer_callback is not None and jax.default_backend() == "cpu"


class InPlace:
    """A function of numpy arrays that a program calls each time it runs.

    work: gets the arrays it reads and, in a second list, those of the same shapes and dtypes that it is to fill; they
    share their memory where XLA can arrange that. It is the owner's to keep this object for as long as programs run.
    """

    def __init__(self, work: Callable[[list[Array], list[Array]], None]) -> None:
        self.work = work
        # One object for all calls: JAX finds by it what it has compiled outside of jit. It must not keep this one.
        self._callback = functools.partial(_run, weakref.ref(self))

    def __call__(self, arrays: Sequence[Any], after: Any) -> tuple[list[Any], Any]:
        """What `work` makes of arrays, and a scalar that is there when it has done so.

        after: a scalar that must be there before.
        """
        given = [*arrays, after]
        kinds = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in given]
        aliases = {at: at for at in range(len(given))}
        call = buffer_callback(self._callback, kinds, has_side_effect=True, input_output_aliases=aliases)
        *results, done = call(*given)
        return results, done


def _run(owner: weakref.ref[InPlace], _: Any, results: Sequence[Any], *arrays: Any) -> None:
    call = owner()
    if call is None:
        raise HorovodInternalError(
            "The reduction that this program was compiled with is gone: the wrapped optimizer was thrown away."
        )
    call.work([np.asarray(one) for one in arrays[:-1]], [np.asarray(one) for one in results[:-1]])
