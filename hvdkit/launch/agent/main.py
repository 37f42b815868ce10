"""What an agent does from its start to its exit code."""

from __future__ import annotations

import os
import signal
import sys

from .daemon import await_hvdrun, end_daemon
from .place import Place, adopt_environment, may_be_outlived, read_environment_of, read_place
from .rank import Agent
from .segments import remove_dead_segments
from .stream import open_log
from .wire import Gone, open_control


def main(arguments: list[str]) -> int:
    """Run the command after `--` as a rank.

    Before that, for one that others have started: `--joins N`, its number, and `--like P`, the process of the agent of
    a rank on this host, whose variables it takes.
    """
    own, command = split_arguments(arguments)
    if "--like" in own:
        at = own.index("--like")
        like = read_environment_of(int(own[at + 1]))
        # Anew, as others may come to be like this one: what a process was started with is what they see.
        anew = [*sys.orig_argv[: -len(arguments)], *own[:at], *own[at + 2 :], "--", *command]
        os.execve(sys.executable, anew, adopt_environment(os.environ, like))
    place = read_place(os.environ, int(own[1]) if own else None)
    where, secret = os.environ.get("HVDKIT_CONTROL", ""), os.environ.get("HVDKIT_CONTROL_SECRET", "")
    code, deserted = 1, False
    remove_dead_segments()
    try:
        again = os.environ.get("HVDKIT_START", "1") != "1"
        log = open_log(os.environ.get("HVDKIT_OUTPUT_DIRECTORY", ""), place.rank, again=again)
    except OSError as error:
        _say(place, f"cannot write its log: {error}")
        return 1
    try:
        control = open_control(where, secret, place.rank) if where else None
        agent = Agent(place, control, log)
        try:
            code = agent.run(command, os.environ)
        finally:
            deserted = agent.deserted
    except Gone as error:
        _say(place, f"has lost hvdrun, or cannot reach it: {error}")
    if code:
        remove_dead_segments()
    outlived = may_be_outlived(os.environ)
    if deserted and not (outlived and where.startswith("tcp:") and await_hvdrun(where, secret)):
        end_daemon()
    if code and outlived:
        # Of an exit code Open MPI's daemon does not tell the other ranks, who would wait for this one for ever.
        os.kill(os.getpid(), signal.SIGKILL)
    return code


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The agent's own arguments, and the command."""
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _say(place: Place, what: str) -> None:
    print(f"hvdkit: rank {place.rank} on {place.host} {what}", file=sys.stderr)
