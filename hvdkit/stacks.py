"""What this process is doing, for hvdrun's agent to see at any time: also when it sits in C code and runs no Python.

A signal makes the standard library's faulthandler write the stacks of all threads. It is installed when hvdkit is
imported, since a rank may hang before init(). Where it writes is memory with a name (memfd_create), by which the agent
finds it among the open files of the ranks' processes, and which is gone with the process.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal

from hvdkit.world import under_agent

_SIGNAL = 12  # after SIGRTMIN; nothing that is known to run beside Python uses it
_memory: int | None = None


def offer_stacks() -> None:
    """Let the agent ask; once is enough. Does nothing where there is no agent, or a system without memfd_create."""
    global _memory
    if _memory is not None or not under_agent() or not hasattr(os, "memfd_create"):
        return
    number = signal.SIGRTMIN + _SIGNAL
    if signal.getsignal(number) is not signal.SIG_DFL:
        return  # somebody's own
    # hvdkit.launch.agent.stacks looks for this name. The pid in it tells this process from forked children.
    _memory = os.memfd_create(f"hvdkit-stacks-{os.getpid()}-{number}")
    fcntl.fcntl(_memory, fcntl.F_SETFL, os.O_APPEND)  # the agent empties it
    faulthandler.register(number, file=_memory, all_threads=True)
