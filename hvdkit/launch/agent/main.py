"""What an agent does from its start to its exit code."""

from __future__ import annotations

import os
import signal
import sys

from .daemon import end_daemon
from .place import Place, read_place
from .rank import Agent
from .stream import open_log
from .wire import Gone, open_control


def main(arguments: list[str]) -> int:
    """Run the command after `--` as a rank. `--joins N` before that: of ranks that others have started, the first N."""
    own, command = split_arguments(arguments)
    place = read_place(os.environ, int(own[1]) if own else None)
    code, deserted = 1, False
    try:
        log = open_log(os.environ.get("HVDKIT_OUTPUT_DIRECTORY", ""), place.rank)
    except OSError as error:
        _say(place, f"cannot write its log: {error}")
        return 1
    try:
        where, secret = os.environ.get("HVDKIT_CONTROL", ""), os.environ.get("HVDKIT_CONTROL_SECRET", "")
        control = open_control(where, secret, place.rank) if where else None
        agent = Agent(place, control, log)
        try:
            code = agent.run(command, os.environ)
        finally:
            deserted = agent.deserted
    except Gone as error:
        _say(place, f"has lost hvdrun, or cannot reach it: {error}")
    if deserted:
        end_daemon()
    if code and os.environ.get("HVDKIT_ELASTIC") == "1":
        # Of an exit code Open MPI's daemon does not tell the other ranks, who would wait for this one for ever.
        os.kill(os.getpid(), signal.SIGKILL)
    return code


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The agent's own arguments, and the command."""
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _say(place: Place, what: str) -> None:
    print(f"hvdkit: rank {place.rank} on {place.host} {what}", file=sys.stderr)
