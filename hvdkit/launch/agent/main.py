"""Run an agent, from its arguments to its exit code."""

from __future__ import annotations

import os
import signal
import sys

from .partition_tolerance import end_daemon, wait_for_hvdrun
from .rank import Agent
from .rank_identity import RankIdentity, adopt_environment, identify_rank, read_environment_of, survivors_continue
from .shm_cleanup import remove_abandoned_files, remove_dead_segments
from .stream import open_log
from .wire import HvdrunLost, connect_to_hvdrun


def main(arguments: list[str]) -> int:
    """Run the command after `--` as a rank.

    Options before it are for replacements of lost ranks: `--joins N` gives the number, and `--like P` the process of
    another rank's agent on this host, whose environment the command gets.
    """
    end = arguments.index("--")
    own, command = arguments[:end], arguments[end + 1 :]
    if "--like" in own:
        at = own.index("--like")
        like = read_environment_of(int(own[at + 1]))
        # Later replacements can read only the environment that a process was started with.
        restart = [*sys.orig_argv[: -len(arguments)], *own[:at], *own[at + 2 :], "--", *command]
        os.execve(sys.executable, restart, adopt_environment(os.environ, like))
    identity = identify_rank(os.environ, int(own[1]) if own else None)
    where, secret = os.environ.get("HVDKIT_CONTROL", ""), os.environ.get("HVDKIT_CONTROL_SECRET", "")
    code, hvdrun_lost = 1, False
    remove_dead_segments()
    try:
        again = os.environ.get("HVDKIT_START", "1") != "1"
        log = open_log(os.environ.get("HVDKIT_OUTPUT_DIRECTORY", ""), identity.rank, again=again)
    except OSError as error:
        _say(identity, f"cannot write its log: {error}")
        return 1
    try:
        control = connect_to_hvdrun(where, secret, identity.rank) if where else None
        agent = Agent(identity, control, log)
        try:
            code = agent.run(command, os.environ)
        finally:
            hvdrun_lost = agent.hvdrun_lost
    except HvdrunLost as error:
        _say(identity, f"was not started: {error}")
    if code:
        remove_dead_segments()
        remove_abandoned_files()
    elastic = survivors_continue(os.environ)
    if hvdrun_lost and not (elastic and where.startswith("tcp:") and wait_for_hvdrun(where, secret)):
        end_daemon()
    if code and elastic:
        # Open MPI's daemon reports no exit code to the other ranks, which would wait for this rank for ever.
        os.kill(os.getpid(), signal.SIGKILL)
    return code


def _say(identity: RankIdentity, what: str) -> None:
    print(f"hvdkit: rank {identity.rank} on {identity.host} {what}", file=sys.stderr)
