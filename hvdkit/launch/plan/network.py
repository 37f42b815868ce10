"""Choose the network between hosts: the subnet that all hosts share; interface names may differ."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdkit.errors import LaunchError

# Networks inside a host, of container engines and virtual machines.
_INSIDE = re.compile(r"docker\d*|br-[0-9a-f]{12}|podman\d*|cni\d+|virbr\d+|lxc(br)?\d+|lxdbr\d+|veth.*")


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}")


@dataclass(frozen=True)
class InterfaceAddress:
    """An address of a host's interface.

    subnet: like "10.0.0.0/24".
    speed: Mbit/s; 0 if unknown.
    """

    name: str
    address: str
    subnet: str
    speed: int = 0

    @property
    def between_hosts(self) -> bool:
        """Can it reach other hosts? No if its name is that of a network inside a host, or the address is link-local."""
        address = ipaddress.ip_address(self.address)
        return not (_INSIDE.fullmatch(self.name) or address.is_link_local or address.is_loopback)

    @property
    def loopback(self) -> bool:
        """Is it an address of the loopback interface?"""
        return ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        return f"{self.name} {self.address}/{self.subnet.rpartition('/')[2]}"


@dataclass(frozen=True)
class HostInterfaces:
    """The interfaces of a host. reached: the address from which it has connected to hvdrun."""

    interfaces: tuple[InterfaceAddress, ...]
    reached: str = ""


@dataclass(frozen=True)
class NetworkChoice:
    """The interfaces to use, by host, and the reason, as a sentence without its full stop."""

    interfaces: Mapping[str, tuple[InterfaceAddress, ...]]
    why: str


def parse_interfaces(rows: Iterable[Sequence[object]]) -> tuple[InterfaceAddress, ...]:
    """Parse an agent's list of [name, address, length of prefix, Mbit/s].

    Raises ValueError for an invalid list.
    """
    interfaces = []
    kinds = (str, str, int, int)
    if not isinstance(rows, (list, tuple)):
        raise ValueError(f"{rows!r} is not a list of interfaces")
    for row in rows:
        if not isinstance(row, (list, tuple)) or tuple(map(type, row)) != kinds:
            raise ValueError(f"{row!r} is not an interface")
        name, address, bits, speed = row
        subnet = ipaddress.ip_network(f"{address}/{bits}", strict=False)
        interfaces.append(InterfaceAddress(str(name), str(address), str(subnet), int(str(speed))))
    return tuple(interfaces)


def choose_network(hosts: Mapping[str, HostInterfaces], wish: Sequence[str] = ()) -> NetworkChoice:
    """Choose each host's interfaces.

    wish: names of interfaces or subnets; () for a subnet that the hosts share: of several the fastest, then the subnet
    through which hosts have connected to hvdrun, because their names resolve to it.
    Raises LaunchError if a host has none of the wished interfaces.
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
        return NetworkChoice(chosen, f"ranks on different hosts communicate over {subnet} ({', '.join(names)})")
    reached = {
        host: tuple(each for each in connection.interfaces if each.address == connection.reached)
        for host, connection in hosts.items()
    }
    shown = ", ".join(f"{host}: {each}" for host, interfaces in reached.items() for each in interfaces)
    return NetworkChoice(
        {host: interfaces for host, interfaces in reached.items() if interfaces},
        f"the hosts share no subnet; each uses the address from which it has connected to hvdrun ({shown})",
    )


def find_shared_subnets(hosts: Mapping[str, HostInterfaces]) -> tuple[str, ...]:
    """Find the subnets in which every host has an address of its own.

    A subnet in which two hosts have the same address is inside each of them, such as a container engine's bridge.
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


def plan_network_variables(interfaces: Sequence[InterfaceAddress], environ: Mapping[str, str]) -> dict[str, str]:
    """Plan the variables by which a rank's libraries use these interfaces of its host.

    environ: the rank's variables, which take precedence.
    """
    if not interfaces:
        return {}
    names = list(dict.fromkeys(each.name for each in interfaces))
    # Open MPI accepts subnets of IPv4 only.
    places = [each.subnet if ":" not in each.subnet else each.name for each in interfaces]
    variables = {
        "GLOO_SOCKET_IFNAME": names[0],
        "NCCL_SOCKET_IFNAME": "=" + ",".join(names),  # =: exact names, not prefixes
        "FI_TCP_IFACE": names[0],  # libfabric, under MPICH and Intel MPI
    }
    if "OMPI_MCA_btl_tcp_if_exclude" not in environ:
        variables["OMPI_MCA_btl_tcp_if_include"] = ",".join(dict.fromkeys(places))
    return {name: value for name, value in variables.items() if name not in environ}


def parse_wish(text: str) -> tuple[str, ...]:
    """Parse `--network-interfaces`: names and subnets, separated by commas.

    Raises LaunchError with the words that are neither.
    """
    parts = tuple(part.strip() for part in text.split(","))
    wrong = [part for part in parts if not _NAME.fullmatch(part) and not _is_subnet(part)]
    if wrong:
        raise LaunchError(
            f"--network-interfaces {text!r}: {', '.join(map(repr, wrong))} is neither an interface's name nor "
            "a subnet. Write it like --network-interfaces eth0,ib0 or --network-interfaces 10.0.0.0/24.",
            code="network-invalid",
        )
    return parts


def matches(interface: InterfaceAddress, wish: Sequence[str]) -> bool:
    """Does an interface have one of these names, or an address in one of these subnets?"""
    address = ipaddress.ip_address(interface.address)
    return any(
        address in ipaddress.ip_network(each, strict=False) if "/" in each else interface.name == each for each in wish
    )


def is_inside(address: str, subnet: str) -> bool:
    """Is an address, "" for none, in a subnet?"""
    return bool(address) and ipaddress.ip_address(address.partition("%")[0]) in ipaddress.ip_network(subnet)


def _choose_wished(hosts: Mapping[str, HostInterfaces], wish: Sequence[str]) -> NetworkChoice:
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
            f"--network-interfaces {','.join(wish)} matches no interface of some hosts: {'; '.join(problems)}. Name "
            "one interface for each host, or a subnet that they share.",
            code="network-missing",
        )
    shown = "; ".join(f"{host}: {', '.join(map(str, interfaces))}" for host, interfaces in chosen.items())
    return NetworkChoice(chosen, f"ranks on different hosts communicate over --network-interfaces ({shown})")


def _rate(hosts: Mapping[str, HostInterfaces], subnet: str) -> tuple[int, int, bool]:
    """Return a subnet's slowest speed in Mbit/s, the number of hosts connected through it, and whether it is IPv4."""
    inside = [
        (connection, each) for connection in hosts.values() for each in connection.interfaces if each.subnet == subnet
    ]
    speeds = [each.speed for _, each in inside]
    used = sum(connection.reached == each.address for connection, each in inside)
    return min(speeds), used, ":" not in subnet


def _is_subnet(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return "/" in text


def describe_unknown(names: Iterable[str]) -> str:
    """Describe the hosts that neither the name service nor ssh's configuration resolves; "" for none."""
    unknown = list(names)
    if not unknown:
        return ""
    return (
        f"Unknown host{'s' if len(unknown) > 1 else ''}: {', '.join(unknown)}. "
        "Check the spelling; a name must be in DNS, /etc/hosts or ~/.ssh/config."
    )


def plan_daemon_variables(
    targets: Sequence[str], interfaces: Sequence[InterfaceAddress], wish: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Plan Open MPI's parameters that restrict its daemons to the subnets with all other hosts.

    By default they try every address, also a container engine's, which on each host belongs to another machine.
    Open MPI 5 ignores a subnet, with a warning, on an interface that has an address of IPv6 too, and ends with SIGSEGV
    if two interfaces are excluded by name: then the plan has no restriction.

    targets: an address of each other host, "" if it is unknown.
    interfaces: of this machine.
    wish: see choose_network.
    environ: the user's own parameters take precedence.
    """
    own = [each for each in interfaces if ":" not in each.subnet]
    wished = [each for each in own if wish and matches(each, wish)]
    chosen = wished or [each for each in own if all(is_inside(target, each.subnet) for target in targets)]
    chosen_names = {each.name for each in chosen}
    ignored = any(each.name in chosen_names and each.between_hosts for each in interfaces if each not in own)
    names = ("PRTE_MCA_prte_if_include", "OMPI_MCA_oob_tcp_if_include")
    own_parameters = [name for name in environ if re.fullmatch(r"(PRTE|OMPI)_MCA_(prte|oob_tcp)_if_(in|ex)clude", name)]
    if own_parameters or ignored or not chosen:
        return {}
    return dict.fromkeys(names, ",".join(dict.fromkeys(each.subnet for each in chosen)))
