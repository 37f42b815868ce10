"""What this process is doing, for hvdrun's agent to see at any time: also when it sits in C code and runs no Python.

It is asked in two ways, as neither is enough. A thread that waits at a pipe writes the stacks of all threads; it needs
Python's lock for that, and does not get it from C code that keeps it. A signal has the main thread write its own stack,
whatever it is in. Only its own: stacks of threads that run change while they are read, and a process that does so
without the lock crashes sooner or later.

Both write by the standard library's faulthandler, to memory with a name (memfd_create), by which the agent finds it
among the open files of the ranks' processes, and which is gone with the process. The signal is answered from the import
of hvdkit on, since a rank may hang before init(); the thread is there from init() on.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import threading

from hvdkit.world import under_agent

_SIGNAL = 12  # after SIGRTMIN; nothing that is known to run beside Python uses it
_LARGEST_READ = 4096  # questions that have come meanwhile have one answer


class _Offer:
    """memory: to write to. pipe: its end from which the thread reads questions. -1 before they are made."""

    def __init__(self) -> None:
        self.memory = self.pipe = -1
        self.answering = False

    def answer(self) -> None:
        """Write the stacks of all threads at each question. It comes from who has found the memory open."""
        while os.read(self.pipe, _LARGEST_READ):
            os.ftruncate(self.memory, 0)
            faulthandler.dump_traceback(self.memory, all_threads=True)


_offer = _Offer()


def offer_stacks() -> None:
    """Let the agent ask; once is enough. Does nothing where there is no agent, or a system without memfd_create."""
    if _offer.memory >= 0 or not under_agent() or not hasattr(os, "memfd_create"):
        return
    number = signal.SIGRTMIN + _SIGNAL
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
        return  # somebody's own
    if threading.current_thread() is threading.main_thread():
        # What faulthandler puts back when Python ends: the process may still wait in MPI_Finalize, and be asked.
        signal.signal(number, signal.SIG_IGN)
    _offer.pipe, questions = os.pipe()
    # hvdkit.launch.agent.stacks looks for this name. The pid in it tells this process from forked children, the inode
    # the pipe from what may have its number later.
    name = f"hvdkit-stacks-{os.getpid()}-{number}-{questions}-{os.fstat(questions).st_ino}"
    _offer.memory = os.memfd_create(name)
    fcntl.fcntl(_offer.memory, fcntl.F_SETFL, os.O_APPEND)  # the agent empties it
    faulthandler.register(number, file=_offer.memory, all_threads=False)


def offer_all_stacks() -> None:
    """Let the agent ask for the stacks of all threads, if it may ask at all; once is enough."""
    if _offer.memory >= 0 and not _offer.answering:
        _offer.answering = True
        threading.Thread(target=_offer.answer, name="hvdkit-stacks", daemon=True).start()
