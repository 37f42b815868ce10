"""Which network the ranks use between hosts: the subnet that all hosts share, whatever its interfaces are called."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdkit.errors import LaunchError

# Networks inside a host: container engines', virtual machines'.
_INSIDE = re.compile(r"docker\d*|br-[0-9a-f]{12}|podman\d*|cni\d+|virbr\d+|lxc(br)?\d+|lxdbr\d+|veth.*")


@dataclass(frozen=True)
class Interface:
    """An address of a host.

    subnet: like "10.0.0.0/24".
    speed: Mbit/s; 0 if it does not say.
    """

    name: str
    address: str
    subnet: str
    speed: int = 0

    @property
    def between_hosts(self) -> bool:
        """Could it lead to other hosts? Not if it is known for leading into this one, or needs no configuration."""
        return not _INSIDE.fullmatch(self.name) and not ipaddress.ip_address(self.address).is_link_local

    def __str__(self) -> str:
        return f"{self.name} {self.address}/{self.subnet.rpartition('/')[2]}"


@dataclass(frozen=True)
class Connection:
    """How a host is connected.

    reached: which of its addresses it has used towards hvdrun.
    """

    interfaces: tuple[Interface, ...]
    reached: str = ""


@dataclass(frozen=True)
class Network:
    """What was chosen: for each host the interfaces to use, and why, as a sentence without its full stop."""

    interfaces: Mapping[str, tuple[Interface, ...]]
    why: str


def parse_interfaces(rows: Iterable[Sequence[object]]) -> tuple[Interface, ...]:
    """Take what an agent says of its host, a list of [name, address, length of prefix, Mbit/s].

    Raises ValueError for what no agent says.
    """
    found = []
    kinds = (str, str, int, int)
    if not isinstance(rows, (list, tuple)):
        raise ValueError(f"{rows!r} is no list of interfaces")
    for row in rows:
        if not isinstance(row, (list, tuple)) or tuple(map(type, row)) != kinds:
            raise ValueError(f"{row!r} is no interface")
        name, address, bits, speed = row
        subnet = ipaddress.ip_network(f"{address}/{bits}", strict=False)
        found.append(Interface(str(name), str(address), str(subnet), int(str(speed))))
    return tuple(found)


def choose_network(hosts: Mapping[str, Connection], wish: Sequence[str] = ()) -> Network:
    """Choose each host's interfaces.

    wish: names of interfaces or subnets; () leaves the choice to what the hosts share: of several subnets the fastest,
    then the one by which hosts have reached hvdrun, which is the one that their names stand for.
    Raises LaunchError if a host has nothing of what is wished.
    """
    if wish:
        return _choose_wished(hosts, wish)
    shared = find_shared_subnets(hosts)
    if shared:
        subnet = max(shared, key=lambda subnet: _rate(hosts, subnet))
        chosen = {
            host: tuple(each for each in connection.interfaces if each.subnet == subnet)[:1]
            for host, connection in hosts.items()
        }
        names = dict.fromkeys(each.name for interfaces in chosen.values() for each in interfaces)
        return Network(chosen, f"ranks on different hosts talk over {subnet} ({', '.join(names)})")
    reached = {
        host: tuple(each for each in connection.interfaces if each.address == connection.reached)
        for host, connection in hosts.items()
    }
    shown = ", ".join(f"{host}: {each}" for host, interfaces in reached.items() for each in interfaces)
    return Network(
        {host: interfaces for host, interfaces in reached.items() if interfaces},
        f"the hosts share no subnet; each uses the address by which it has reached hvdrun ({shown})",
    )


def find_shared_subnets(hosts: Mapping[str, Connection]) -> tuple[str, ...]:
    """Find the subnets in which every host has an address of its own.

    A subnet in which two hosts have the same address is one inside each of them, a container engine's bridge say.
    """
    shared: dict[str, set[str]] | None = None
    for connection in hosts.values():
        mine: dict[str, set[str]] = {}
        for each in connection.interfaces:
            if each.between_hosts:
                mine.setdefault(each.subnet, set()).add(each.address)
        if shared is None:
            shared = mine
        else:
            shared = {
                subnet: addresses | mine[subnet]
                for subnet, addresses in shared.items()
                if subnet in mine and not addresses & mine[subnet]
            }
    return tuple(shared or ())


def plan_network_variables(interfaces: Sequence[Interface], environ: Mapping[str, str]) -> dict[str, str]:
    """Tell the libraries of a rank which interfaces of its host to use, unless the user has.

    environ: what the rank has already.
    """
    if not interfaces:
        return {}
    names = list(dict.fromkeys(each.name for each in interfaces))
    # Open MPI takes subnets of IPv4 only.
    places = [each.subnet if ":" not in each.subnet else each.name for each in interfaces]
    variables = {
        "GLOO_SOCKET_IFNAME": names[0],
        "NCCL_SOCKET_IFNAME": "=" + ",".join(names),  # =: not what merely begins so
        "FI_TCP_IFACE": names[0],  # libfabric, under MPICH and Intel MPI
    }
    if "OMPI_MCA_btl_tcp_if_exclude" not in environ:
        variables["OMPI_MCA_btl_tcp_if_include"] = ",".join(dict.fromkeys(places))
    return {name: value for name, value in variables.items() if name not in environ}


def parse_wish(text: str) -> tuple[str, ...]:
    """Parse `--network-interfaces`: names and subnets with commas between them.

    Raises LaunchError naming what is neither.
    """
    parts = tuple(part.strip() for part in text.split(","))
    wrong = [part for part in parts if not _is_name(part) and not _is_subnet(part)]
    if wrong:
        raise LaunchError(
            f"--network-interfaces {text!r}: {', '.join(map(repr, wrong))} is neither an interface's name nor "
            "a subnet. Write it like --network-interfaces eth0,ib0 or --network-interfaces 10.0.0.0/24."
        )
    return parts


def matches(interface: Interface, wish: Sequence[str]) -> bool:
    """Tell whether an interface is one of those that were named, or is in a subnet that was."""
    address = ipaddress.ip_address(interface.address)
    return any(
        address in ipaddress.ip_network(each, strict=False) if "/" in each else interface.name == each for each in wish
    )


def is_inside(address: str, subnet: str) -> bool:
    """Tell whether an address, "" for none, is in a subnet."""
    return bool(address) and ipaddress.ip_address(address.partition("%")[0]) in ipaddress.ip_network(subnet)


def _choose_wished(hosts: Mapping[str, Connection], wish: Sequence[str]) -> Network:
    chosen = {
        host: tuple(each for each in connection.interfaces if matches(each, wish)) for host, connection in hosts.items()
    }
    problems = [
        f"{host} has {', '.join(map(str, hosts[host].interfaces)) or 'none'}"
        for host, interfaces in chosen.items()
        if not interfaces
    ]
    if problems:
        raise LaunchError(
            f"--network-interfaces {','.join(wish)} fits no interface of some hosts: {'; '.join(problems)}. Name "
            "one for each host, or a subnet that they share."
        )
    shown = "; ".join(f"{host}: {', '.join(map(str, interfaces))}" for host, interfaces in chosen.items())
    return Network(chosen, f"ranks on different hosts talk over what --network-interfaces says ({shown})")


def _rate(hosts: Mapping[str, Connection], subnet: str) -> tuple[int, int, bool]:
    """How fast its slowest interface is, how many hosts have used it towards hvdrun, and whether it is IPv4."""
    inside = [
        (connection, each) for connection in hosts.values() for each in connection.interfaces if each.subnet == subnet
    ]
    speeds = [each.speed for _, each in inside]
    used = sum(connection.reached == each.address for connection, each in inside)
    return min(speeds), used, ":" not in subnet


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}", text) is not None


def _is_subnet(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return "/" in text
