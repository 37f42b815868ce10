"""The variables by which scripts for torchrun, Keras' distribution and JAX find their rank and each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from hvdkit.errors import LaunchError
from hvdkit.launch.agent.ports import COUNT
from hvdkit.world import HVDRUN_RUN_ID

# The same on all ranks, and the user's value counts.
_PLACES = ("MASTER_ADDR", "MASTER_PORT", "KERAS_DISTRIBUTION_JOB_ADDRESSES", "JAX_COORDINATOR_ADDRESS")
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def plan_rank_variables(
    hosts: Mapping[int, str], address: str, ports: Sequence[int], job: str, environ: Mapping[str, str]
) -> dict[int, dict[str, str]]:
    """Settle the variables of each rank.

    hosts: of all ranks, by rank. address: of rank 0's host, as the other ranks reach it. ports: of that host,
    COUNT or none; without them the addresses are left out. job: its name. environ: what the ranks have.
    Raises LaunchError for what the user has set that cannot be true of this job.
    """
    order = {host: number for number, host in enumerate(dict.fromkeys(hosts[rank] for rank in sorted(hosts)))}
    sizes = Counter(hosts.values())
    local: Counter[str] = Counter()
    planned = {}
    for rank in sorted(hosts):
        host = hosts[rank]
        planned[rank] = _number_rank(rank, len(hosts), local[host], sizes[host], order[host], len(order))
        local[host] += 1
    _refuse_contradictions(planned, environ)
    shared = _plan_addresses(address, ports)
    shared["TORCHELASTIC_RUN_ID"] = f"{HVDRUN_RUN_ID}{job}"
    if shared.keys() & set(_PLACES) and any(environ.get(name) for name in _PROXIES):
        # JAX's processes find each other by gRPC, which asks a proxy for any address that is not named here.
        shared["no_grpc_proxy"] = ",".join(filter(None, (address, environ.get("no_proxy"))))
    return {
        rank: {name: value for name, value in {**shared, **own}.items() if name not in environ}
        for rank, own in planned.items()
    }


def is_number_of_rank(name: str) -> bool:
    """Does hvdrun give each rank a value of its own, or one that follows from the job's size?"""
    return name in _number_rank(0, 1, 0, 1, 0, 1)


def _number_rank(rank: int, size: int, local_rank: int, local_size: int, host: int, hosts: int) -> dict[str, str]:
    numbers = dict.fromkeys(("RANK", "ROLE_RANK", "KERAS_DISTRIBUTION_PROCESS_ID", "JAX_PROCESS_ID"), rank)
    numbers |= dict.fromkeys(
        ("WORLD_SIZE", "ROLE_WORLD_SIZE", "KERAS_DISTRIBUTION_NUM_PROCESSES", "JAX_NUM_PROCESSES"), size
    )
    numbers |= {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    numbers |= {"GROUP_RANK": host, "GROUP_WORLD_SIZE": hosts}
    return {name: str(number) for name, number in numbers.items()}


def _plan_addresses(address: str, ports: Sequence[int]) -> dict[str, str]:
    if len(ports) < COUNT:
        return {}
    coordinator = f"[{address}]:{ports[1]}" if ":" in address else f"{address}:{ports[1]}"
    return dict(zip(_PLACES, (address, str(ports[0]), coordinator, coordinator), strict=True))


def _refuse_contradictions(planned: Mapping[int, Mapping[str, str]], environ: Mapping[str, str]) -> None:
    wrong = {}
    for name in planned[min(planned)]:
        values = {each[name] for each in planned.values()}
        if name in environ and values != {environ[name]}:
            wrong[name] = f"{name}={environ[name]} ({values.pop() if len(values) == 1 else 'each rank has its own'})"
    if wrong:
        ranks = f"{len(planned)} rank{'s' * (len(planned) > 1)}"
        raise LaunchError(
            f"Variables of the environment contradict this job of {ranks}; the job's values are in brackets: "
            f"{', '.join(wrong.values())}. Scripts for torchrun, Keras or JAX would wait for ranks that do not exist. "
            f"Run: unset {' '.join(wrong)}"
        )
    port = environ.get("MASTER_PORT")
    if port is not None and not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 2**16):
        raise LaunchError(f"MASTER_PORT={port} is no port; set one from 1 to 65535, or run: unset MASTER_PORT")
