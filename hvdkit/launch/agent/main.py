"""What an agent does from its start to its exit code."""

from __future__ import annotations

import os
import sys

from .place import read_place
from .rank import Agent
from .stream import open_log
from .wire import Gone, open_control


def main(arguments: list[str]) -> int:
    """Run the command after `--` as a rank."""
    command = arguments[arguments.index("--") + 1 :]
    place = read_place(os.environ)
    try:
        where = os.environ.get("HVDKIT_CONTROL", "")
        control = open_control(where, os.environ.get("HVDKIT_CONTROL_SECRET", "")) if where else None
        log = open_log(os.environ.get("HVDKIT_OUTPUT_DIRECTORY", ""), place[0])
        return Agent(place, control, log).run(command, os.environ)
    except Gone as error:
        print(f"hvdkit: rank {place[0]} on {place[3]} has lost hvdrun, or cannot reach it: {error}", file=sys.stderr)
    except OSError as error:
        print(f"hvdkit: rank {place[0]} on {place[3]} cannot write its log: {error}", file=sys.stderr)
    return 1
