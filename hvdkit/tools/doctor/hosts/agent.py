"""What doctor starts on each host: it answers requests, a line of JSON each, until its input ends.

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
from dataclasses import asdict
from typing import Any

from hvdkit import __version__
from hvdkit.config import read_environment
from hvdkit.launch.plan.resolve_hosts import resolve
from hvdkit.launch.process import run_program
from hvdkit.tools.doctor.collect.host import collect
from hvdkit.tools.doctor.hosts.responder import Responder, measure_bandwidth, try_connection
from hvdkit.tools.doctor.hosts.start import LOGIN, ssh_argv

#: An agent whose doctor was killed ends after this time at the latest.
_LONGEST_S = 120.0
_LOGIN_TIMEOUT_S = 12.0


def _collect(*, variables: Mapping[str, str]) -> dict[str, Any]:
    """Collect all facts. variables: what the job's ranks get, over those of this login."""
    return asdict(collect({**read_environment(), **variables}))


def _listen(*, secret: str, host: str) -> int:
    """Answer to other agents as this host; returns the port."""
    return Responder(secret, host).port


def _resolve(*, names: list[str]) -> list[list[str]]:
    with ThreadPoolExecutor() as pool:
        return [list(addresses) for addresses in pool.map(resolve, names)]


def _connect(*, secret: str, targets: list[tuple[str, int, str]]) -> list[str]:
    """Try connections to (address, port, host); returns their problems, "" for none."""

    def connect(target: tuple[str, int, str]) -> str:
        address, port, host = target
        return try_connection(address, port, secret, host)

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(connect, targets))


def _measure(*, secret: str, targets: list[tuple[str, int, str]]) -> list[float]:
    """Measure the bandwidth from (address, port, host), one after another, in Mbit/s."""
    return [measure_bandwidth(address, port, secret, host) for address, port, host in targets]


def _login(*, logins: list[str], options: list[str]) -> list[dict[str, Any] | None]:
    """Try ssh; returns None for a login that works, else the status and the output of ssh."""

    def log_in(login: str) -> dict[str, Any] | None:
        argv = ssh_argv(login, ["echo", LOGIN], options)
        result = run_program(argv, environ=read_environment(), timeout_s=_LOGIN_TIMEOUT_S)
        if result.status == 0 and LOGIN in result.stdout:
            return None
        return {"status": result.status, "said": result.stderr or result.stdout}

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(log_in, logins))


_REQUESTS: dict[str, Callable[..., Any]] = {
    "collect": _collect,
    "clock": time.time,
    "listen": _listen,
    "resolve": _resolve,
    "connect": _connect,
    "measure": _measure,
    "login": _login,
}


def main() -> int:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not stand between the answers
    watchdog = threading.Timer(_LONGEST_S, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    print(json.dumps({"hello": __version__}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"answer": _REQUESTS[request.pop("do")](**request)}
        except Exception as error:  # doctor reports it; an agent that ends would say less
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers)
    os._exit(0)  # threads may still wait for connections


if __name__ == "__main__":
    main()
