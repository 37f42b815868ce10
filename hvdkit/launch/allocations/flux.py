"""The hosts of a Flux instance or job, from its resource set.

Flux sets no variable that lists hosts (flux-environment(7)), so its command is asked for R, the resource set (Flux RFC
20, version 1): in a batch script or a shell of `flux alloc` that of the instance, in a job that of the job.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import FoundHosts, Host
from hvdkit.launch.hostfiles.names import MOST_HOSTS
from hvdkit.launch.hostfiles.scheduler_lists import parse_nodelist
from hvdkit.launch.process import run_program

_TIMEOUT_S = 20.0
_MORE = "request more with flux alloc or flux batch (-N, -n, -c), or set them here with --slots-per-host"


def read_flux(environ: Mapping[str, str], slots: int | None = None) -> FoundHosts | None:
    """Read the resources of this job, else of this instance; None without FLUX_URI.

    A host has a slot for each of its GPUs, else for each of its cores. Raises LaunchError.
    """
    if "FLUX_URI" not in environ:
        return None
    tasks, job = environ.get("FLUX_JOB_SIZE", "1"), environ.get("FLUX_JOB_ID", "")
    if job and tasks != "1":
        raise LaunchError(
            f"flux run started hvdrun {tasks} times. Start hvdrun once, in a script of flux batch or a shell of flux "
            "alloc; or start the training script itself with flux run."
        )
    source = f"Flux job {job}" if job else "the Flux instance"
    program = shutil.which("flux", path=environ.get("PATH", os.defpath))
    if program is None:
        raise LaunchError("FLUX_URI is set, but flux is not on PATH. Add it to PATH, or name the hosts with -H.")
    words = ("job", "info", job, "R") if job else ("resource", "R")
    result = run_program([program, *words], environ=environ, timeout_s=_TIMEOUT_S)
    command = f"flux {' '.join(words)}"
    if result.status != 0:
        raise LaunchError(
            f"{command}: {result.ending}: {result.output.strip()[-300:]}. Check FLUX_URI, or name the hosts with -H."
        )
    try:
        hosts = parse_resources(result.stdout, slots)
    except ValueError as problem:
        raise LaunchError(f"{command}: {problem}. Name the hosts with -H.") from None
    counted = "GPU" if any("gpu" in children for _, children in _list_children(json.loads(result.stdout))) else "core"
    note = f"{source}: a host has a slot for each {counted}. Set another number of ranks with --slots-per-host."
    return FoundHosts(hosts, source, () if slots else (note,), more=_MORE, allocated=True)


def parse_resources(text: str, slots: int | None = None) -> tuple[Host, ...]:
    """Parse R in JSON into its hosts, in the order of Flux's ranks. Raises ValueError with what is wrong."""
    try:
        resources = json.loads(text)
        names = [host.name for part in resources["execution"]["nodelist"] for host in parse_nodelist(part)]
        children = dict(_list_children(resources))
        if len(children) != len(names):
            raise ValueError(f"it has resources of {len(children)} ranks, and {len(names)} hosts")
        counts = [_count_slots(children[rank]) for rank in sorted(children)]
    except (KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"{text[:200]!r} is not a resource set of version 1 ({problem})") from None
    if not names:
        raise ValueError("it has no hosts")
    return tuple(Host(name, slots or count) for name, count in zip(names, counts, strict=True))


def _list_children(resources: Any) -> Iterator[tuple[int, Mapping[str, str]]]:
    for entry in resources["execution"]["R_lite"]:
        for rank in parse_idset(entry["rank"]):
            yield rank, entry["children"]


def _count_slots(children: Mapping[str, str]) -> int:
    return len(parse_idset(children.get("gpu", ""))) or len(parse_idset(children["core"])) or 1


def parse_idset(text: str) -> list[int]:
    """Parse numbers and ranges like 0-3,7 (Flux RFC 22); brackets may stand around them. Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.removeprefix("[").removesuffix("]").split(",")):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first or last - first >= MOST_HOSTS:
            raise ValueError(f"{text[:100]!r} is not a list of numbers like 0-3,7")
        numbers += range(first, last + 1)
    return numbers
