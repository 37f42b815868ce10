"""A call from a compiled JAX program that works in XLA's own memory, on the CPU.

jax.experimental.io_callback copies what goes into the callback and what comes out of it, into fresh memory each time.
XLA's foreign function interface (jax.ffi, xla/ffi/api/c_api.h in jaxlib) gives pointers instead. It is meant for C; the
handler here is a function of Python which ctypes gives a C address, so nothing has to be compiled.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import jax
import numpy as np

from hvdkit.errors import HorovodInternalError
from hvdkit.transport.base import Array

_TARGET = "hvdkit_in_place"
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL


class _Version(Structure):
    _fields_ = (("size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int))


class _Metadata(Structure):
    _fields_ = (("size", c_size_t), ("version", _Version), ("traits", c_uint32))


class _MetadataExtension(Structure):
    _fields_ = (("size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(_Metadata)))


class _Error(Structure):
    _fields_ = (("size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int))


_CreateError = ctypes.CFUNCTYPE(c_void_p, POINTER(_Error))


class _Api(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("version", _Version),
        ("internal", c_void_p),
        ("create_error", _CreateError),
    )


class _Buffer(Structure):
    _fields_ = (("size", c_size_t), ("extension", c_void_p), ("dtype", c_int), ("data", c_void_p))


class _Scalar(Structure):
    _fields_ = (("dtype", c_int), ("value", POINTER(c_int64)))


class _List(Structure):
    """Of arguments or results."""

    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("count", c_int64),
        ("types", c_void_p),
        ("items", POINTER(POINTER(_Buffer))),
    )


class _Attributes(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("count", c_int64),
        ("types", c_void_p),
        ("names", c_void_p),
        ("items", POINTER(POINTER(_Scalar))),
    )


class _Frame(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", POINTER(_MetadataExtension)),
        ("api", POINTER(_Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", _List),
        ("results", _List),
        ("attributes", _Attributes),
    )


_numbers = itertools.count()
_calls: weakref.WeakValueDictionary[int, InPlace] = weakref.WeakValueDictionary()


class InPlace:
    """A function of numpy arrays that a program calls each time it runs.

    work: gets the arrays it reads and, in a second list, those of the same shapes and dtypes that it is to fill; they
    share their memory where XLA can arrange that. It is the owner's to keep this object for as long as programs run.
    """

    def __init__(self, work: Callable[[list[Array], list[Array]], None]) -> None:
        self.number = next(_numbers)
        self._work = work
        self._shapes: list[tuple[tuple[int, ...], Any]] = []
        _calls[self.number] = self

    def __call__(self, arrays: Sequence[Any], after: Any) -> tuple[list[Any], Any]:
        """What `work` makes of arrays, and a scalar that is there when it has done so.

        arrays: of the same shapes and dtypes each time, else ValueError. after: a scalar that must be there before.
        """
        _register()
        shapes = [(tuple(one.shape), np.dtype(one.dtype)) for one in arrays]
        if self._shapes not in ([], shapes):
            raise ValueError(
                f"These arrays have other shapes or dtypes than those before: {shapes}, not {self._shapes}."
            )
        self._shapes = shapes
        kinds = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (*arrays, after)]
        aliases = {at: at for at in range(len(kinds))}
        call = jax.ffi.ffi_call(_TARGET, kinds, has_side_effect=True, input_output_aliases=aliases)
        *results, done = call(*arrays, after, which=np.int64(self.number))
        return results, done

    def run(self, frame: _Frame) -> None:
        """Work on the memory that the frame points to."""
        self._work(self._view(frame.arguments), self._view(frame.results))

    def _view(self, given: _List) -> list[Array]:
        if given.count != len(self._shapes) + 1:
            raise HorovodInternalError(f"XLA gives {given.count} buffers; {len(self._shapes) + 1} were asked for.")
        views = []
        for at, (shape, dtype) in enumerate(self._shapes):
            size = dtype.itemsize * int(np.prod(shape))
            memory = (c_char * size).from_address(given.items[at].contents.data or 0) if size else bytearray()
            views.append(np.frombuffer(memory, dtype).reshape(shape))
        return views


def _handle(pointer: Any) -> int | None:
    """The handler: an address of an error, or None."""
    frame = pointer.contents
    if frame.extension:
        version = frame.api.contents.version
        told = frame.extension.contents.metadata.contents
        told.version.major, told.version.minor = version.major, version.minor
        told.traits = 0
        return None
    if frame.stage != _EXECUTE:
        return None
    try:
        which = frame.attributes.items[0].contents.value.contents.value
        call = _calls.get(which)
        if call is None:
            raise HorovodInternalError(
                "The reduction that this program was compiled with is gone: the wrapped optimizer was thrown away."
            )
        call.run(frame)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".encode()
        made = _Error(ctypes.sizeof(_Error), None, text, _INTERNAL)
        address: int | None = frame.api.contents.create_error(ctypes.byref(made))
        return address
    return None


_handler = ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))(_handle)


@functools.cache
def _register() -> None:
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_handler), platform="cpu")


def works() -> bool:
    """Is there such an interface where programs run by default?"""
    return hasattr(jax, "ffi") and jax.default_backend() == "cpu"
