"""Calls of Open MPI's PMIx library, for cases of lost processes that Open MPI itself does not handle.

Open MPI does not notice the loss of a whole host: the launcher's daemon on that host reports deaths, and is lost with
it. Open MPI gets deaths from PMIx events, so each rank sends such an event to itself.
"""

from __future__ import annotations

import ctypes
import functools

from hvdkit.log import logger

# From the PMIx standard, chapters 5 to 7; this code has never changed.
_PROCESS_ABORTED = -7
_TO_THIS_PROCESS_ONLY = 7
_TYPE_PROC = 22
_AFFECTED = b"pmix.evproc"
_LONGEST_NAMESPACE, _LONGEST_KEY = 255, 511


class _Proc(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * (_LONGEST_NAMESPACE + 1)), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    # The largest member of the union takes 64 bytes.
    _fields_ = (("proc", ctypes.POINTER(_Proc)), ("room", ctypes.c_uint64 * 8))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class _Info(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * (_LONGEST_KEY + 1)), ("flags", ctypes.c_uint32), ("value", _Value))


def report_loss_to_mpi(name: str) -> None:
    """Notify MPI that a process has died, so that operations that wait for it fail.

    name: the process's name for MPI's launcher, as "namespace:number"; an invalid name is ignored.
    """
    namespace, _, number = name.rpartition(":")
    encoded = namespace.encode()
    if not encoded or len(encoded) > _LONGEST_NAMESPACE or not number.isdecimal():
        return
    library = _load_pmix()
    if library is None:
        logger.warning("MPI cannot be notified that %s has died, because its PMIx library was not found.", name)
        return
    gone, info = _Proc(encoded, int(number)), _Info()
    info.key, info.value.type = _AFFECTED, _TYPE_PROC
    info.value.data.proc = ctypes.pointer(gone)
    status = library.PMIx_Notify_event(
        *(ctypes.c_int(_PROCESS_ABORTED), ctypes.byref(gone), ctypes.c_uint8(_TO_THIS_PROCESS_ONLY)),
        *(ctypes.byref(info), ctypes.c_size_t(1), None, None),
    )
    if status:
        logger.warning("MPI could not be notified that %s has died: PMIx_Notify_event returned %d.", name, status)


def leave_launcher() -> None:
    """Report to MPI's launcher that this process ends without an error, without calling MPI_Finalize.

    MPI_Finalize would wait for connections to processes that have died or left before.
    """
    library = _load_pmix()
    if library is not None:
        library.PMIx_Finalize(None, ctypes.c_size_t(0))


@functools.cache
def _load_pmix() -> ctypes.CDLL | None:
    """Return the PMIx library that MPI has loaded; another copy would not be connected to the launcher."""
    try:
        with open("/proc/self/maps") as file:
            paths = [line.split(maxsplit=5)[-1].strip() for line in file if "libpmix" in line]
    except OSError:
        return None
    return ctypes.CDLL(paths[0]) if paths else None
