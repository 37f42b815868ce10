"""hvdkit doctor on hosts of the lab, and what it found."""

from __future__ import annotations

import json
import sys
from typing import Any

from cluster.lab import Lab, environment

DOCTOR = (sys.executable, "-m", "hvdkit", "doctor", "--json")
HOSTS = "node1:2,node2:2,node3:2"

#: A finding's name and its hosts.
Found = tuple[str, list[str]]


def look(lab: Lab, *arguments: str, hosts: str = HOSTS, **variables: str) -> dict[str, Any]:
    """What it says on node1 of several hosts; without the small job unless there are other arguments."""
    options = arguments or ("--no-allreduce",)
    return ask(lab, "node1", [*DOCTOR, "-H", hosts, *options], **variables)


def look_here(lab: Lab, host: str, *arguments: str, shell: str = "", **variables: str) -> list[str]:
    """The names of what it finds on one host by itself. shell: what is done first in the same shell."""
    command = ["bash", "-c", f'{shell or ":"}; exec "$@"', "bash", *DOCTOR, "--here", *arguments]
    return [name for name, _ in found(ask(lab, host, command, **variables))]


def ask(lab: Lab, host: str, command: list[str], **variables: str) -> dict[str, Any]:
    """Run it and read its JSON; its exit code is what the JSON says."""
    answer = lab.run(host, command, env=environment(**variables))
    assert answer.stdout, answer.stderr
    told: dict[str, Any] = json.loads(answer.stdout)
    assert answer.returncode == told["exit_code"]
    assert "Traceback" not in answer.stderr
    return told


def found(told: dict[str, Any]) -> list[Found]:
    """Names and hosts of all findings, sorted."""
    return sorted((finding["name"], finding["hosts"]) for finding in told["findings"])
