"""libnccl and librccl through ctypes: finds the library, declares its functions, and converts its errors.

NCCL's C interface is stable within major version 2, so no binding package and no compiler is needed. Functions, structs
and numbers are those of nccl.h 2.18. RCCL, AMD's library, has the same in its header (2.21.5 was read), and the same
encoding of versions.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from enum import IntEnum
from pathlib import Path

from hvdkit.errors import MissingDependencyError, TransportError
from hvdkit.transport.c_library import CLibrary
from hvdkit.transport.hip import ROCM_CURE

#: (major, minor, patch), as 2.18.1.
Version = tuple[int, int, int]

#: The oldest supported version: it has ncclCommInitRankConfig() with the layout of Config below. ROCm 6.0 has it.
OLDEST: Version = (2, 18, 1)

UNIQUE_ID_BYTES = 128
#: ncclScalarHostImmediate: NCCL reads a factor in the host's memory before the call returns.
HOST_SCALAR = 1
_UNDEFINED = -(2**31)
_MAGIC = 0xCAFEBEEF


class Result(IntEnum):
    """ncclResult_t."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8


#: Name of a dtype that NCCL reduces -> ncclDataType_t.
REDUCIBLE = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
#: ncclDataType_t of memory that is moved but not reduced.
BYTES = REDUCIBLE["uint8"]
#: Complex dtype -> dtype of its real and imaginary parts.
_PARTS = {"complex64": "float32", "complex128": "float64"}
#: Name of an operation -> ncclRedOp_t.
OPERATIONS = {"sum": 0, "product": 1, "max": 2, "min": 3, "average": 4}


def as_reals(dtype: str) -> tuple[str, int]:
    """Return the dtype and the number of the real numbers of which an element consists."""
    return (_PARTS[dtype], 2) if dtype in _PARTS else (dtype, 1)


class UniqueId(ctypes.Structure):
    """ncclUniqueId: one rank makes it and sends it to all ranks of a communicator."""

    _fields_ = (("internal", c_char * UNIQUE_ID_BYTES),)

    def to_bytes(self) -> bytes:
        """Return all 128 bytes; `internal` itself would end at the first zero."""
        return ctypes.string_at(ctypes.byref(self), UNIQUE_ID_BYTES)


class Config(ctypes.Structure):
    """ncclConfig_t of version 2.18, which later libraries accept too, by its `size` and `version`."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
        ("traffic_class", c_int),  # since 2.25; earlier, these bytes were padding at the end of the struct
    )


def make_config() -> Config:
    """Make a Config of nonblocking calls that leaves all other options to NCCL and its variables."""
    undefined = (_UNDEFINED,) * 3
    version = OLDEST[0] * 10000 + OLDEST[1] * 100 + OLDEST[2]
    return Config(ctypes.sizeof(Config), _MAGIC, version, 0, *undefined, None, _UNDEFINED, _UNDEFINED)


_COMMUNICATOR = _STREAM = _MEMORY = c_void_p
#: Function -> its parameters' types. All return an ncclResult_t except those in _TEXTS.
_FUNCTIONS: dict[str, tuple[object, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRankConfig": (POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)),
    "ncclCommFinalize": (_COMMUNICATOR,),
    "ncclCommDestroy": (_COMMUNICATOR,),
    "ncclCommAbort": (_COMMUNICATOR,),
    "ncclCommGetAsyncError": (_COMMUNICATOR, POINTER(c_int)),
    "ncclAllReduce": (_MEMORY, _MEMORY, c_size_t, c_int, c_int, _COMMUNICATOR, _STREAM),
    "ncclReduceScatter": (_MEMORY, _MEMORY, c_size_t, c_int, c_int, _COMMUNICATOR, _STREAM),
    "ncclReduce": (_MEMORY, _MEMORY, c_size_t, c_int, c_int, c_int, _COMMUNICATOR, _STREAM),
    "ncclAllGather": (_MEMORY, _MEMORY, c_size_t, c_int, _COMMUNICATOR, _STREAM),
    "ncclBroadcast": (_MEMORY, _MEMORY, c_size_t, c_int, c_int, _COMMUNICATOR, _STREAM),
    "ncclSend": (_MEMORY, c_size_t, c_int, c_int, _COMMUNICATOR, _STREAM),
    "ncclRecv": (_MEMORY, c_size_t, c_int, c_int, _COMMUNICATOR, _STREAM),
    "ncclRedOpCreatePreMulSum": (POINTER(c_int), c_void_p, c_int, c_int, _COMMUNICATOR),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclGetErrorString": (c_int,),
    "ncclGetLastError": (_COMMUNICATOR,),
}
_TEXTS = ("ncclGetErrorString", "ncclGetLastError")
CURE = (
    "Install a CUDA build of your framework, which brings NCCL, or run: pip install nvidia-nccl-cu13 (nvidia-nccl-cu12 "
    "for CUDA 12)."
)
_SAME_NAMES = {name: (name, types) for name, types in _FUNCTIONS.items()}
NCCL = CLibrary("NCCL", ("libnccl.so.2",), _SAME_NAMES, CURE, _TEXTS)
_RCCL_CURE = f"{ROCM_CURE} Or name its file in HVDKIT_NCCL_LIBRARY."
RCCL = CLibrary("RCCL", ("librccl.so.1", "librccl.so"), _SAME_NAMES, _RCCL_CURE, _TEXTS)

#: Lock that allows one call of NCCL at a time: a thread must not query a communicator's state while another uses it. An
#: abort takes the lock too, so its holder may use a communicator that was not aborted before.
calling = threading.RLock()
_ABORT_S = 5.0  # limit of the wait for another thread's call; then its communicator is aborted anyway


class NcclError(TransportError):
    """A call of NCCL has failed. result: the ncclResult_t that it returned."""

    def __init__(self, message: str, result: int) -> None:
        super().__init__(message)
        self.result = result


class Library:
    """An opened libnccl or librccl.

    name: "NCCL" or "RCCL".
    path: its file.
    version: of the library, not of the headers of a framework's build.
    """

    def __init__(self, path: str = "", kind: CLibrary = NCCL) -> None:
        """Open the library. path: its file; "" to try those of `kind`.

        Raises MissingDependencyError if that fails, or if it is too old.
        """
        self.name = kind.name
        self.path, self._functions = kind.open(path)
        code = c_int()
        self.call("ncclGetVersion", code)
        self.version: Version = (code.value // 10000, code.value // 100 % 100, code.value % 100)
        if self.version < OLDEST:
            raise MissingDependencyError(
                f"{self.name} {_dotted(self.version)} in {self.path} is too old: hvdkit needs {_dotted(OLDEST)} or "
                f"later. {kind.cure}"
            )

    def call(self, function: str, *arguments: object, where: str = "", handle: c_void_p | None = None) -> Result:
        """Call a function. Returns SUCCESS, or IN_PROGRESS from a communicator that does not block.

        function: the name. arguments: the function's arguments. where: the rank, host and GPU, for the message.
        handle: the communicator, for NCCL's own text of its last error.
        Raises NcclError if NCCL returns anything else.
        """
        with calling:
            result = self._functions[function](*arguments)
        if result in (Result.SUCCESS, Result.IN_PROGRESS):
            return Result(result)
        raise self.error(function, result, where, handle)

    def abort(self, handle: c_void_p, where: str) -> None:
        """Call ncclCommAbort, even if another thread is blocked in a call on the communicator. Raises NcclError."""
        alone = calling.acquire(timeout=_ABORT_S)
        try:
            result = self._functions["ncclCommAbort"](handle)
        finally:
            if alone:
                calling.release()
        if result not in (Result.SUCCESS, Result.IN_PROGRESS):
            raise self.error("ncclCommAbort", result, where)

    def error(self, function: str, result: int, where: str = "", handle: c_void_p | None = None) -> NcclError:
        """Make the error of a call that returned `result`."""
        text = (self._functions["ncclGetErrorString"](result) or b"unknown error").decode(errors="replace")
        last = (self._functions["ncclGetLastError"](handle) or b"").decode(errors="replace").strip()
        on = f" on {where}" if where else ""
        details = f" {self.name}'s last message: {last}." if last else ""
        library = f"{self.name} {_dotted(self.version)} in {self.path}"
        return NcclError(
            f"{function} failed{on}: {text} (ncclResult {result}, {library}).{details} "
            "NCCL_DEBUG=INFO in the environment of the ranks shows more.",
            result,
        )


def find_library(named: str = "") -> str:
    """Return the libnccl to open: `named`, or the first of this process's loaded library, the wheel's, the system's.

    A second copy besides a framework's own would have its own communicators and environment.
    """
    return _find(named, NCCL) or NCCL.files[0]


@functools.cache
def load_nccl(named: str = "", kind: CLibrary = NCCL) -> Library:
    """Open libnccl or librccl, once. named: see find_library(). Raises MissingDependencyError."""
    return Library(_find(named, kind), kind)


def _find(named: str, kind: CLibrary) -> str:
    """Return the file to open; "" for those that `kind` names."""
    return named or next(iter(kind.mapped()), "") or (_wheels() if kind is NCCL else "")


def _wheels() -> str:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder, "nccl", "lib", "libnccl.so.2")
        if path.exists():
            return str(path)
    return ""


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
