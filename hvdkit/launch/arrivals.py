"""Before any rank starts its command all have to be there: is it the job that was asked for, and what is each told?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.launch.affinity import plan_cores
from hvdkit.launch.agent.orders import find_unplanned
from hvdkit.launch.network import Connection, choose_network, parse_interfaces, plan_network_variables
from hvdkit.launch.preflight import Machine, parse_machine

# With TCP alone between hosts nothing else is worth looking for, and that takes Open MPI a second at each start.
_PLAIN_TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct", "OMPI_MCA_osc": "^ucx"}


@dataclass(frozen=True)
class Arrival:
    """What an agent says of itself before its command starts.

    size: of the job, as the launcher told it; 0 if it told nothing.
    fabric: its host has something faster than TCP. machine: the rest of its host. joins: ranks that are there have
    started it, in place of one that was lost. process: what Open MPI's launcher calls it; "" where there is none.
    """

    rank: int
    size: int
    host: str
    connection: Connection
    fabric: bool = False
    machine: Machine = field(default_factory=Machine)
    joins: bool = False
    process: str = ""


@dataclass(frozen=True)
class Orders:
    """What each rank is told at its start, and what hvdrun may tell of it.

    told: by rank, for the agent.
    """

    told: Mapping[int, Mapping[str, Any]]
    why: str = ""


def parse_arrival(hello: Mapping[str, Any]) -> Arrival:
    """Take what an agent has sent; raises ValueError for what no agent sends."""
    rank, size, host = (hello.get(name) for name in ("rank", "size", "host"))
    if type(rank) is not int or type(size) is not int or not isinstance(host, str) or rank < 0 or size < 0:
        raise ValueError(f"rank {rank!r} of {size!r} on {host!r}")
    connection = Connection(parse_interfaces(hello.get("interfaces", ())), str(hello.get("address", "")))
    machine = parse_machine(hello.get("machine", {}))
    joins, process = bool(hello.get("joins")), str(hello.get("process", ""))
    return Arrival(rank, size, host, connection, bool(hello.get("fabric")), machine, joins, process)


def check_arrival(arrival: Arrival, size: int, hosts: Mapping[int, str]) -> str:
    """Say what is wrong with a rank that arrives; "" if nothing is.

    size: of the job. hosts: of the ranks that are there already.
    """
    who = f"rank {arrival.rank} on {arrival.host}"
    if arrival.joins:
        return "" if arrival.rank >= size and arrival.rank not in hosts else f"{who} is there already, and was started."
    if arrival.size not in (0, size):
        return (
            f"{who} was started as one of {arrival.size}, and {size} were asked for. The launcher and hvdrun do not "
            "speak of the same job: start hvdrun once, and not under srun, mpirun or mpiexec."
        )
    if arrival.rank >= size:
        return f"{who} was started, and {size} ranks were asked for. Start hvdrun once, and not under another launcher."
    if arrival.rank in hosts:
        return (
            f"rank {arrival.rank} was started twice, on {hosts[arrival.rank]} and on {arrival.host}: the launcher took "
            "each rank for a job of its own. Take the launcher that belongs to this MPI (see hvdrun --verbose)."
        )
    return ""


def check_layout(planned: Sequence[tuple[str, int]], hosts: Mapping[int, str]) -> str:
    """Say how the ranks' places differ from the plan; "" if they do not.

    planned: (host, ranks) as was asked; () if anything will do. Names are not compared: one host has several.
    hosts: of all ranks, as they call themselves.
    """
    seen = Counter(hosts.values())
    if not planned or sorted(seen.values()) == sorted(count for _, count in planned if count):
        return ""
    return (
        f"the launcher has put the ranks elsewhere than it was told: {_list(seen.items())} in place of "
        f"{_list(planned)}. If hosts share a name, give each its own; else look at what hvdrun --verbose shows."
    )


def plan_orders(
    arrivals: Mapping[int, Arrival],
    environ: Mapping[str, str],
    wish: Sequence[str],
    window: Sequence[object] | None,
    bind: str = "auto",
    slots: Mapping[int, int] | None = None,
) -> Orders:
    """Settle what each rank needs to know of the others.

    environ: what the ranks have. wish: see choose_network. window: of the terminal, for rank 0. bind: see plan_cores.
    slots: by rank, how many ranks its host has room for, where ranks may be started in place of others.
    Raises LaunchError for a wish that some host cannot fulfil.
    """
    counts = Counter(arrival.host for arrival in arrivals.values())
    one_host = len(counts) == 1
    variables: Mapping[str, Mapping[str, str]] = {}
    why = ""
    if not one_host:
        network = choose_network({arrival.host: arrival.connection for arrival in arrivals.values()}, wish)
        plain = {} if any(arrival.fabric for arrival in arrivals.values()) else _PLAIN_TCP
        variables = {
            host: {**plain, **plan_network_variables(network.interfaces.get(host, ()), environ)} for host in counts
        }
        why = network.why
    cores: dict[int, Any] = {}
    for host in counts:
        cores.update(plan_cores({r: one.machine.allowed for r, one in arrivals.items() if one.host == host}, bind))
    told: dict[int, dict[str, Any]] = {
        rank: {
            "window": window if rank == 0 else None,
            "local_size": counts[arrival.host],
            "one_host": one_host,
            "variables": {**variables.get(arrival.host, {}), **_tell_slots((slots or {}).get(rank, 0))},
            "cores": cores[rank],
        }
        for rank, arrival in arrivals.items()
    }
    unplanned = find_unplanned(name for each in told.values() for name in each["variables"])
    if unplanned:
        raise LaunchError(f"{', '.join(unplanned)} would be refused by the agents: agent/orders.py has to list them.")
    return Orders(told, why)


def _tell_slots(slots: int) -> dict[str, str]:
    return {"HVDKIT_HOST_SLOTS": str(slots)} if slots else {}


def _list(places: Any) -> str:
    return ", ".join(f"{count} on {host}" for host, count in places if count)
