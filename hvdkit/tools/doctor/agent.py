"""What doctor starts on each host: answers questions, a line of JSON each, until its input ends.

{"do": "collect", ...}  ->  {"answer": ...}   or   {"error": "..."}
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hvdkit import __version__
from hvdkit.config import read_environment
from hvdkit.tools.doctor.codec import encode
from hvdkit.tools.doctor.hosts.start import LOGIN, ssh_argv
from hvdkit.tools.doctor.hosts.wire import Listener, greet, measure
from hvdkit.tools.doctor.look.collect import collect
from hvdkit.tools.doctor.look.network import resolve
from hvdkit.tools.doctor.probe import run_program

#: An agent whose doctor was killed ends by itself.
_LONGEST_S = 120.0
_LOGIN_TIMEOUT_S = 10.0


class Agent:
    """One host's answers."""

    def __init__(self) -> None:
        self._listener: Listener | None = None

    def collect(self, *, variables: Mapping[str, str]) -> dict[str, Any]:
        """See all facts. variables: what the job's ranks get, over those of this login."""
        return encode(collect({**read_environment(), **variables}))

    def clock(self) -> float:
        """Tell the time, in seconds since 1970."""
        return time.time()

    def listen(self, *, greeting: str) -> int:
        """Answer to others, at the port that is returned."""
        self._listener = Listener(greeting)
        return self._listener.port

    def lookup(self, *, names: list[str]) -> list[list[str]]:
        """Find the addresses of names."""
        with ThreadPoolExecutor() as pool:
            return [list(found) for found in pool.map(resolve, names)]

    def reach(self, *, targets: list[tuple[str, int, str]]) -> list[str]:
        """Connect to addresses, ports, greetings; returns the problems, "" for none."""
        with ThreadPoolExecutor(32) as pool:
            return list(pool.map(lambda target: greet(*target), targets))

    def measure(self, *, targets: list[tuple[str, int, str]]) -> list[float]:
        """Measure how fast data comes from addresses, one after another, in Mbit/s."""
        return [measure(*target) for target in targets]

    def login(self, *, logins: list[str], options: list[str]) -> list[dict[str, Any] | None]:
        """Try ssh; returns None for what works, else status and what ssh said."""
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(lambda login: self._login(login, options), logins))

    def _login(self, login: str, options: list[str]) -> dict[str, Any] | None:
        argv = ssh_argv(login, ["echo", LOGIN], options)
        status, out, err = run_program(argv, environ=read_environment(), timeout_s=_LOGIN_TIMEOUT_S)
        return None if status == 0 and LOGIN in out else {"status": status, "said": err or out}


def main() -> int:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not stand between the answers
    watchdog = threading.Timer(_LONGEST_S, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    agent = Agent()
    commands: dict[str, Callable[..., Any]] = {
        name: getattr(agent, name) for name in ("collect", "clock", "listen", "lookup", "reach", "measure", "login")
    }
    print(json.dumps({"hello": __version__}), file=answers)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            reply = {"answer": commands[question.pop("do")](**question)}
        except Exception as error:  # the doctor tells it; an agent that ends would say less
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers)
    os._exit(0)  # threads may still wait for somebody to connect


if __name__ == "__main__":
    main()
