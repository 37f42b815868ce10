"""Lets hvdrun's agent read this process's stacks at any time, even while it runs C code and no Python.

The agent has two ways to request them, because neither suffices alone. A thread that waits at a pipe writes the stacks
of all threads; it needs Python's lock (the GIL), which it does not get while C code holds it. A signal makes the main
thread write its own stack, whatever it is running. It writes only its own stack: the stacks of running threads change
while they are read, and a process that reads them without the lock crashes sooner or later.

Both write by the standard library's faulthandler, to named memory (memfd_create). The agent finds the name among the
open files of the ranks' processes, and the memory ends with the process. The signal is handled from the import of
hvdkit on, because a rank may hang before init(); the thread runs from init() on.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import threading

from hvdkit.world import under_agent

_SIGNAL = 12  # offset from SIGRTMIN; no known software that runs beside Python uses it
_LARGEST_READ = 4096  # one answer serves all requests that came meanwhile


class _Offer:
    """Answers the agent's requests. memory: descriptor to write to. pipe: descriptor to read from. -1 for none."""

    def __init__(self) -> None:
        self.memory = self.pipe = -1
        self.answering = False

    def answer(self) -> None:
        """Write the stacks of all threads at each request; requests come from a process that found the open memory."""
        while os.read(self.pipe, _LARGEST_READ):
            os.ftruncate(self.memory, 0)
            faulthandler.dump_traceback(self.memory, all_threads=True)


_offer = _Offer()


def offer_stacks() -> None:
    """Let the agent request stacks; further calls do nothing, and neither does it without agent or memfd_create."""
    if _offer.memory >= 0 or not under_agent() or not hasattr(os, "memfd_create"):
        return
    number = signal.SIGRTMIN + _SIGNAL
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
        return  # the program uses this signal itself
    if threading.current_thread() is threading.main_thread():
        # faulthandler restores this handler when Python ends: the process may still wait in MPI_Finalize, and get the
        # signal then.
        signal.signal(number, signal.SIG_IGN)
    _offer.pipe, questions = os.pipe()
    # hvdkit.launch.agent.stacks searches for this name. The pid in it distinguishes this process from forked children,
    # the inode distinguishes the pipe from a file that gets its descriptor later.
    name = f"hvdkit-stacks-{os.getpid()}-{number}-{questions}-{os.fstat(questions).st_ino}"
    _offer.memory = os.memfd_create(name)
    fcntl.fcntl(_offer.memory, fcntl.F_SETFL, os.O_APPEND)  # the agent empties it
    faulthandler.register(number, file=_offer.memory, all_threads=False)


def offer_all_stacks() -> None:
    """Let the agent request the stacks of all threads too, if offer_stacks() succeeded; further calls do nothing."""
    if _offer.memory >= 0 and not _offer.answering:
        _offer.answering = True
        threading.Thread(target=_offer.answer, name="hvdkit-stacks", daemon=True).start()
