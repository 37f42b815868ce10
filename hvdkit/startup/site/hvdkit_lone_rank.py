"""Reports to hvdrun that this rank has imported a framework but, as far as detectable here, joined no other rank.

hvdrun itself knows which ranks have called hvd.init(). Like sitecustomize, this module must run in any Python 3, also
without hvdkit.
"""

import atexit
import os
import resource
import stat
import sys

#: The same message as LONE in hvdkit.launcher_channel.
LONE = b"lone\n"
#: A program that has imported one of these may distribute work among processes with it.
_OTHER_WAYS = ("mpi4py.MPI", "horovod", "ray", "pyspark", "distributed")
_CHILDS_WORK_S = 0.4  # CPU time; the import of a framework takes more, `git describe` less


def watch() -> None:
    """Report it when this process ends, if it has joined no other rank until then."""
    atexit.register(_report, os.getpid())


def _report(process: int) -> None:
    if process != os.getpid() or _has_met_others():
        return
    descriptor, _, inode = os.environ.get("HVDKIT_LAUNCHER_CHANNEL", "").partition(":")
    try:
        found = os.fstat(int(descriptor))
        if stat.S_ISSOCK(found.st_mode) and found.st_ino == int(inode):
            os.write(int(descriptor), LONE)
    except (OSError, ValueError):  # this process is not the rank, but a child of it
        pass


def _has_met_others() -> bool:
    if "TF_CONFIG" in os.environ or any(name in sys.modules for name in _OTHER_WAYS):
        return True
    try:
        if _have_children_worked():
            return True
        # torch's exception hook stays installed when a process group is destroyed.
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
    except Exception:  # another version of a framework: unknown, so report nothing
        return True


def _have_children_worked() -> bool:
    """Return whether child processes worked long enough to be ranks themselves, as with torchrun and mp.spawn().

    Workers of torch's DataLoader do not count. The children have ended, so their CPU time alone is known.
    """
    signals = sys.modules.get("torch.utils.data._utils.signal_handling")
    if getattr(signals, "_SIGCHLD_handler_set", False):
        return False
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime > _CHILDS_WORK_S
