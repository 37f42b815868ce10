"""Registration of ranks at their start: check that they match the requested job, and plan the start orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.launch.agent.wire import find_unplanned
from hvdkit.launch.plan.environment import plan_horovod_variables, plan_rank_variables
from hvdkit.launch.plan.job import Job, name_host
from hvdkit.launch.plan.mpi import WITHOUT_FABRICS
from hvdkit.launch.plan.network import HostInterfaces, choose_network, parse_interfaces, plan_network_variables
from hvdkit.launch.plan.resources import HostResources, find_near_cpus, name_rank_to_nccl, parse_resources


@dataclass(frozen=True)
class Registration:
    """A rank's registration, sent by its agent before the command starts.

    rank: its number in the job.
    size: of the job, from the launcher's variables; 0 without them.
    host: its name by the host itself.
    network: the interfaces of its host.
    fabric: its host has a network faster than TCP.
    resources: of its host.
    joins: other ranks started it, in place of a lost rank.
    process: its name in Open MPI's launcher; "" without a name.
    """

    rank: int
    size: int
    host: str
    network: HostInterfaces
    fabric: bool = False
    resources: HostResources = field(default_factory=HostResources)
    joins: bool = False
    process: str = ""
    ports: tuple[int, ...] = ()  # free on rank 0's host, for servers of its script


@dataclass(frozen=True)
class StartOrders:
    """Messages for the agents, by rank. why: the reason for the network, a sentence without its full stop."""

    by_rank: Mapping[int, Mapping[str, Any]]
    why: str = ""


def parse_registration(hello: Mapping[str, Any]) -> Registration:
    """Parse an agent's message. Raises ValueError for an invalid message."""
    rank, size, host = (hello.get(name) for name in ("rank", "size", "host"))
    if type(rank) is not int or type(size) is not int or not isinstance(host, str) or rank < 0 or size < 0:
        raise ValueError(f"rank {rank!r} of {size!r} on {host!r}")
    network = HostInterfaces(parse_interfaces(hello.get("interfaces", ())), str(hello.get("address", "")))
    resources = parse_resources(hello.get("machine", {}))
    joins, process = bool(hello.get("joins")), str(hello.get("process", ""))
    ports = tuple(hello.get("ports", ()))
    if not all(type(port) is int and 0 < port < 2**16 for port in ports):
        raise ValueError(f"{ports!r} are no ports")
    return Registration(rank, size, host, network, bool(hello.get("fabric")), resources, joins, process, ports)


def check_registration(registration: Registration, size: int, hosts: Mapping[int, str]) -> str:
    """Describe why a rank does not belong to the job; "" if it does.

    size: of the job. hosts: of the ranks that have registered.
    """
    rank, name = registration.rank, f"rank {registration.rank} on {registration.host}"
    if registration.joins:
        return "" if rank >= size and rank not in hosts else f"{name} was started in place of a lost rank, but exists."
    if registration.size not in (0, size):
        return (
            f"{name} was started as one of {registration.size} ranks, but {size} were requested. The launcher started "
            "another job: start hvdrun once, and not under srun, mpirun or mpiexec."
        )
    if rank >= size:
        return (
            f"{name} was started, but {size} ranks were requested. Start hvdrun once, and not under another launcher."
        )
    if rank in hosts:
        return (
            f"rank {rank} was started twice, on {hosts[rank]} and on {registration.host}: the launcher started each "
            "rank as a separate job. Use the launcher that belongs to this MPI (see hvdrun --verbose)."
        )
    return ""


def check_layout(planned: Sequence[tuple[str, int]], hosts: Mapping[int, str]) -> str:
    """Describe how the placement of ranks differs from the plan; "" if it does not.

    planned: (host, ranks) as requested; () for any placement. Names are not compared: a host may have several.
    hosts: of all ranks, by their own names.
    """
    actual = Counter(hosts.values())
    if not planned or sorted(actual.values()) == sorted(count for _, count in planned if count):
        return ""
    return (
        f"the launcher placed the ranks differently than requested: {_list(actual.items())} instead of "
        f"{_list(planned)}. If hosts share a name, give each its own; else check the launcher's command line "
        "(hvdrun --verbose)."
    )


def plan_start_orders(
    registrations: Mapping[int, Registration],
    job: Job,
    window: Sequence[object] | None = None,
    name: str = "",
    held: Mapping[int, Mapping[str, Any]] | None = None,
) -> StartOrders:
    """Plan each rank's variables and binding from the registrations of all ranks.

    registrations: by rank.
    job: the plan of the job.
    window: size of the terminal, for rank 0.
    name: the job's; "" to leave out the variables of plan_rank_variables().
    held: by rank, earlier orders of cores for running ranks; a replacement gets the cores of a lost rank.

    Raises LaunchError for a requested interface that some host does not have.
    """
    counts = Counter(each.host for each in registrations.values())
    one_host = len(counts) == 1
    variables: Mapping[str, Mapping[str, str]] = {}
    why, address = "", "127.0.0.1"
    if not one_host:
        network = choose_network({each.host: each.network for each in registrations.values()}, job.networks)
        fabrics = {} if any(each.fabric for each in registrations.values()) else WITHOUT_FABRICS
        own = {host: plan_network_variables(network.interfaces.get(host, ()), job.environ) for host in counts}
        variables = {host: {**fabrics, **own[host]} for host in counts}
        why = network.why
        first = registrations[min(registrations)].host
        address = next((each.address for each in network.interfaces.get(first, ())), first)
    cores: dict[int, Any] = {}
    for host in counts:
        there = {rank: each.resources for rank, each in sorted(registrations.items()) if each.host == host}
        near = find_near_cpus([each.gpus for each in there.values()])
        planned = plan_cores({rank: each.allowed for rank, each in there.items()}, job.bind, near)
        cores.update(take_free_shares(planned, held or {}))
    numbered: dict[int, dict[str, str]] = {}
    if name and job.rank_variables:
        hosts = {rank: each.host for rank, each in registrations.items()}
        if any(each.joins for each in registrations.values()):
            numbered = plan_horovod_variables(hosts)  # the other variables describe the first world only
        else:
            numbered = plan_rank_variables(hosts, address, registrations[0].ports, name, job.environ)
    planned_hosts = job.planned  # replacements may start there
    slots = {host.name: {"HVDKIT_HOST_SLOTS": str(host.slots)} for host in job.hosts if job.survives and host.slots}
    orders: dict[int, dict[str, Any]] = {
        rank: {
            "window": window if rank == 0 else None,
            "local_size": counts[each.host],
            "one_host": one_host,
            "variables": {
                **variables.get(each.host, {}),
                **slots.get(name_host(rank, {}, planned_hosts), {}),
                **numbered.get(rank, {}),
                **(name_rank_to_nccl(rank) if job.config.share_gpus else {}),
            },
            "cores": cores[rank],
        }
        for rank, each in registrations.items()
    }
    unplanned = find_unplanned(name for order in orders.values() for name in order["variables"])
    if unplanned:
        raise LaunchError(
            f"{', '.join(unplanned)} would be refused by the agents: agent/wire.py has to list them.",
            code="bug-start-orders",
        )
    return StartOrders(orders, why)


def plan_cores(allowed: Mapping[int, Sequence[int]], wish: str, near: Sequence[str] = ()) -> dict[int, dict[str, Any]]:
    """Plan the binding of the ranks of one host; their agents know the topology.

    allowed: by rank, the CPUs that the launcher lets it run on.
    wish: the setting `bind`.
    near: the CPUs near the GPU of each rank in their order, as "0-31"; empty if the ranks have no GPUs of their own.

    A rank's order is {"divide": CPUs, "kind": "core" or "numa", "at": index of its share, "ranks": number of shares,
    "near": as above}, or, for a rank that hvdkit does not bind, {"sharers": number of ranks that use the same cores}.
    """
    ranks = sorted(allowed)
    known = all(allowed.values())
    alike = len({tuple(cpus) for cpus in allowed.values()}) == 1  # if not, the launcher has bound them
    if not known or len(ranks) < 2 or wish == "none" or (wish == "auto" and not alike):
        users = Counter(cpu for cpus in allowed.values() for cpu in cpus)
        return {rank: {"sharers": max((users[cpu] for cpu in allowed[rank]), default=len(ranks))} for rank in ranks}
    cpus = sorted(set().union(*allowed.values()))
    kind = "numa" if wish == "numa" else "core"
    order = {"divide": cpus, "kind": kind, "ranks": len(ranks), **({"near": list(near)} if near else {})}
    return {rank: {**order, "at": at} for at, rank in enumerate(ranks)}


def _list(places: Any) -> str:
    return ", ".join(f"{count} on {host}" for host, count in places if count)


Orders = Mapping[int, Mapping[str, Any]]


def take_free_shares(planned: Orders, held: Orders) -> dict[int, Mapping[str, Any]]:
    """Give new ranks of a host the shares of its cores that no running rank has.

    planned: by rank, the orders of plan_cores for the present ranks of the host.
    held: by rank, the earlier orders of the running ranks, which keep them: a process keeps its cores and its GPU.

    New ranks get their planned order if the earlier orders come from several divisions of the host, or if no share is
    free, as on a host that gets more ranks than it had at first.
    """
    running = {rank: held[rank] for rank in planned if rank in held}
    divisions = [{word: value for word, value in order.items() if word != "at"} for order in running.values()]
    if not running or "divide" not in divisions[0] or any(division != divisions[0] for division in divisions):
        return {rank: running.get(rank, order) for rank, order in planned.items()}
    free = iter(sorted(set(range(divisions[0]["ranks"])) - {order["at"] for order in running.values()}))
    orders: dict[int, Mapping[str, Any]] = {}
    for rank, order in planned.items():
        at = None if rank in running else next(free, None)
        orders[rank] = running.get(rank, order) if at is None else {**divisions[0], "at": at}
    return orders
