"""`python -I -S enter.py PID COMMAND...`: run a command in all namespaces of PID.

Unlike nsenter(1) it passes signals on, takes the command with it when it is killed, stays in the same folder, and ends
as the command ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

# CLONE_NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET
_ALL = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_PASSED_ON = {
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


def main(pid: int, command: list[str]) -> int:
    """Run the command; returns its exit code, or ends by the signal that ended it."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = os.getcwd()
    node = os.pidfd_open(pid)
    if libc.setns(node, _ALL) != 0:
        print(f"enter.py: {pid}: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return 125
    os.close(node)
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()  # only a child is inside the namespace of pids
    if child == 0:
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        with contextlib.suppress(OSError):
            os.chdir(folder)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"enter.py: {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), sys.argv[2:]))
