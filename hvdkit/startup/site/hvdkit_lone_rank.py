"""Report to hvdrun that this rank has imported a framework, and met no other rank in a way that can be known here.

hvdrun knows itself who has called hvd.init(). Like sitecustomize this has to run in any Python 3, without hvdkit.
"""

import atexit
import os
import stat
import sys

#: In hvdkit.launcher_channel too.
LONE = b"lone\n"
#: Who has imported one of these may share work among processes by it.
_OTHER_WAYS = ("mpi4py.MPI", "horovod", "ray", "pyspark", "distributed")


def watch() -> None:
    """Report it when this process ends, if it still is so."""
    atexit.register(_report, os.getpid())


def _report(process: int) -> None:
    if process != os.getpid() or _has_met_others():
        return
    descriptor, _, inode = os.environ.get("HVDKIT_LAUNCHER_CHANNEL", "").partition(":")
    try:
        found = os.fstat(int(descriptor))
        if stat.S_ISSOCK(found.st_mode) and found.st_ino == int(inode):
            os.write(int(descriptor), LONE)
    except (OSError, ValueError):  # this is not the rank, but a process that it has started
        pass


def _has_met_others() -> bool:
    if "TF_CONFIG" in os.environ or any(name in sys.modules for name in _OTHER_WAYS):
        return True
    try:
        # The hook stays when a process group is destroyed.
        torch = sys.modules.get("torch.distributed")
        if getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
            return True
        if torch is not None and torch.is_available() and torch.is_initialized():
            return True
        jax = sys.modules.get("jax._src.distributed")
        if jax is not None and jax.global_state.num_processes not in (None, 1):
            return True
        with open("/proc/self/maps") as maps:
            return "/libmpi" in maps.read()
    except Exception:  # another version of a framework: nothing is known
        return True
