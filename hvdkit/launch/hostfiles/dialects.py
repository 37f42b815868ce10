"""The table of host-list dialects, with the grammar, recogniser, writer and rules of each; write hosts in a dialect."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import grammars
from hvdkit.launch.hostfiles.grammars import Reading, content_lines, read_lines
from hvdkit.launch.hostfiles.names import Host, check_user, parse_hosts, parse_list

_SLOTS = {"slots": "slots"}
# Open MPI's own synonyms.
_OPENMPI_KEYS = {
    **dict.fromkeys(("slots", "cpu", "count"), "slots"),
    **{
        f"{a}{joint}{b}": "max_slots"
        for joint in "_-"
        for word in ("slots", "cpu", "count")
        for a, b in (("max", word), (word, "max"))
    },
    **dict.fromkeys(("username", "user_name", "user-name"), "user"),
}


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One format of a list of hosts.

    name: for --hostfile-format. title: for sentences. sample: a first line of such a file.
    parse: text to Reading; never raises.
    write: hosts to text. Hosts have slots unless `default_slots` is None, and no field that `carries` does not name.
    default_slots: slots of a host without slots in the text; None for the number of its cores.
    rule: a clause with that default and the meaning of repeated hosts.
    carries: which of user, max_slots, ipv6, slots the format can express.
    could_be: can a text be in this dialect? Checked when --hostfile-format is not given.
    """

    name: str
    title: str
    sample: str
    parse: Callable[[str], Reading]
    write: Callable[[Sequence[Host]], str]
    default_slots: int | None = 1
    rule: str
    carries: frozenset[str] = frozenset({"slots"})
    could_be: Callable[[str], bool] = lambda text: True


def _by_line(
    parse_line: Callable[[str], list[Host]], merge: Callable[..., tuple[Host, ...]] | None = None
) -> Callable[[str], Reading]:
    if merge is None:
        return lambda text: read_lines(content_lines(text), parse_line)
    return lambda text: read_lines(content_lines(text), parse_line, merge)


def _each(write_host: Callable[[Host], str]) -> Callable[[Sequence[Host]], str]:
    return lambda hosts: "".join(f"{write_host(host)}\n" for host in hosts)


def _read_openmpi(text: str) -> Reading:
    lines = ((number, line) for number, line in content_lines(text) if not line.startswith("//"))
    return read_lines(lines, _parse_openmpi_line)


def _parse_openmpi_line(content: str) -> list[Host]:
    if re.match(r"rank\s+[0-9]+\s*=", content):
        raise ValueError(f"{content!r} is a line of a rankfile, which hvdrun does not support. Write: node1 slots=4")
    return grammars.parse_keyed(content, _OPENMPI_KEYS)


def _write_openmpi_line(host: Host) -> str:
    values = {"slots": host.slots, "max_slots": host.max_slots}
    return " ".join([host.login, *(f"{key}={value}" for key, value in values.items() if value is not None)])


def _parse_horovod_line(content: str) -> list[Host]:
    if "=" in content or " " in content or "\t" in content:
        return grammars.require_slots(grammars.parse_keyed(content, _SLOTS), content, "Horovod")
    return grammars.require_slots(parse_list(content, grammars.parse_numbered), content, "Horovod")


def _read_deepspeed(text: str) -> Reading:
    """Read a DeepSpeed hostfile, including user@host, which DeepSpeed itself skips."""
    parse_once = grammars.refuse_repeats(
        lambda content: grammars.require_slots(grammars.parse_keyed(content, _SLOTS), content, "DeepSpeed"),
        ", which DeepSpeed does not allow. Add its slots up in one line",
    )
    return read_lines(content_lines(text), parse_once)


def _read_hydra(text: str) -> Reading:
    unused: dict[str, str] = {}

    def parse_line(content: str) -> list[Host]:
        place, *words = content.split()
        hosts = grammars.parse_numbered(place)
        for word in words:
            key, equals, value = word.partition("=")
            if key == "user" and equals:
                hosts = [replace(host, user=check_user(value)) for host in hosts]
            elif key in ("binding", "ifname") and equals:
                flag = "--bind" if key == "binding" else "--network-interfaces"
                unused[key] = f"{key}= is ignored. Use hvdrun's {flag} instead"
            else:
                raise ValueError(
                    f"{word!r} is not a valid word here. After the host only user=NAME is supported, "
                    f"like: {place} user=me"
                )
        return hosts

    return replace(read_lines(content_lines(text), parse_line), notes=tuple(unused.values()))


def _parse_intel_line(content: str) -> list[Host]:
    if content.count(":") == 1:
        raise ValueError(
            f"{content!r} has a number, which Intel MPI's -hostfile does not allow. Its -machinefile does: use "
            "--hostfile-format machinefile"
        )
    return parse_hosts(content)


def _parse_kubernetes_line(content: str) -> list[Host]:
    first, _, rest = content.partition(" ")
    content = rest.strip().strip("'\"") if first == "echo" else content
    return grammars.parse_keyed(content, _SLOTS) if "=" in content else parse_list(content, grammars.parse_numbered)


def _is_discovery_script(text: str) -> bool:
    """Is it a discovery script? Other forms also belong to other dialects, and accepting them would hide mistakes."""
    return any(line.startswith("echo ") for _, line in content_lines(text))


def _read_plain(text: str) -> Reading:
    why = ". Write it once and use --slots-per-host, or use --hostfile-format pbs if a line stands for a rank"
    return read_lines(content_lines(text), grammars.refuse_repeats(parse_hosts, why))


#: Dialects by name, in the order in which they are tried.
DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            name="slurm",
            title="Slurm",
            sample="node[1-3],node7",
            parse=grammars.read_slurm,
            write=grammars.write_slurm,
            rule="a host runs one rank unless SLURM_TASKS_PER_NODE gives more",
            could_be=grammars.is_slurm,
        ),
        Dialect(  # also the format of PRRTE
            name="openmpi",
            title="Open MPI",
            sample="node1 slots=4 max_slots=8",
            parse=_read_openmpi,
            write=_each(_write_openmpi_line),
            default_slots=None,
            rule="a host without slots may run as many ranks as it has cores; if it is repeated, one rank per line",
            carries=frozenset({"slots", "max_slots", "user", "ipv6"}),
        ),
        Dialect(
            name="hydra",
            title="MPICH",
            sample="node1:4",
            parse=_read_hydra,
            write=_each(lambda host: f"{host.name}:{host.slots}{f' user={host.user}' if host.user else ''}"),
            rule="a host without a number runs one rank",
            carries=frozenset({"slots", "user"}),
        ),
        Dialect(
            name="pbs",
            title="PBS",
            sample="node1",
            parse=_by_line(grammars.parse_single_name, grammars.count_repeats),
            write=lambda hosts: "".join(f"{host.name}\n" * (host.slots or 1) for host in hosts),
            rule="a host runs one rank per line with its name",
            carries=frozenset({"slots", "ipv6"}),
        ),
        Dialect(
            name="lsf",
            title="LSF",
            sample="node1 4 node2 4",
            parse=_by_line(grammars.parse_lsf_line, grammars.count_repeats),
            write=grammars.write_lsf,
            rule="a host runs one rank each time it is listed, or as many as the number after it",
            carries=frozenset({"slots", "ipv6"}),
            could_be=grammars.is_lsf,
        ),
        Dialect(
            name="sge",
            title="SGE",
            sample="node1 4 all.q@node1 UNDEFINED",
            parse=_by_line(grammars.parse_sge_line),
            write=_each(lambda host: f"{host.name} {host.slots} all.q@{host.name} UNDEFINED"),
            rule="every host has slots",
            carries=frozenset({"slots", "ipv6"}),
            could_be=grammars.is_sge,
        ),
        Dialect(  # a hostfile of the MPI Operator or Volcano, discover_hosts.sh, or its output
            name="kubernetes",
            title="Kubernetes",
            sample="echo pod-0.pod.ns.svc:4",
            parse=_by_line(_parse_kubernetes_line),
            write=_each(lambda host: f"{host.name}:{host.slots}"),
            rule="a pod without a number runs one rank",
            could_be=_is_discovery_script,
        ),
        Dialect(
            name="machinefile",
            title="Intel MPI's -machinefile",
            sample="node1:4",
            parse=_by_line(grammars.parse_numbered),
            write=_each(lambda host: f"{host.name}:{host.slots}"),
            rule="a host without a number runs one rank",
        ),
        Dialect(
            name="intel",
            title="Intel MPI's -hostfile",
            sample="node1",
            parse=_by_line(_parse_intel_line, grammars.keep_first),
            write=_each(lambda host: host.name),
            default_slots=None,
            rule="a host runs as many ranks as it has cores (or -ppn), and a repeated host counts once",
            carries=frozenset({"ipv6"}),
        ),
        Dialect(  # also the format of -H
            name="horovod",
            title="Horovod",
            sample="node1 slots=4",
            parse=_by_line(_parse_horovod_line),
            write=_each(lambda host: f"{host.name} slots={host.slots}"),
            rule="every host has slots",
            could_be=lambda text: "=" not in text,  # files with "=" are also in Open MPI's dialect
        ),
        Dialect(
            name="deepspeed",
            title="DeepSpeed",
            sample="node1 slots=4",
            parse=_read_deepspeed,
            write=_each(lambda host: f"{host.login} slots={host.slots}"),
            rule="every host has slots, and is listed once",
            carries=frozenset({"slots", "user"}),
        ),
        Dialect(  # ColossalAI, scontrol show hostnames
            name="plain",
            title="plain names",
            sample="node1",
            parse=_read_plain,
            write=_each(lambda host: host.login),
            default_slots=None,
            rule="a host may run as many ranks as it has cores",
            carries=frozenset({"user", "ipv6"}),
            could_be=lambda text: False,
        ),
    )
}

_SYNONYMS = {"prrte": "openmpi", "mpich": "hydra", "impi": "intel", "uge": "sge", "k8s": "kubernetes"}


def find_dialect(name: str) -> Dialect:
    """Find a dialect by its name or synonym, in any case. Raises LaunchError for an unknown name."""
    word = name.strip().lower()
    try:
        return DIALECTS[_SYNONYMS.get(word, word)]
    except KeyError:
        raise LaunchError(
            f"Unknown hostfile format {name!r}. Use auto or one of {', '.join(sorted(DIALECTS))}.",
            code="hostfile-format-unknown",
        ) from None


def convert(hosts: Sequence[Host], dialect: Dialect) -> tuple[str, tuple[str, ...]]:
    """Write hosts in a dialect; returns the text, and notes about limits that it leaves out.

    Raises LaunchError with all properties that the dialect cannot express and that would change the job.
    """
    problems = _find_problems(hosts, dialect)
    if problems:
        raise LaunchError(
            f"These hosts cannot be written in the format of {dialect.title}: {'; '.join(problems)}.",
            code="hosts-not-in-format",
        )
    notes = []
    limited = [host.name for host in hosts if host.max_slots is not None]
    if limited and "max_slots" not in dialect.carries:
        notes.append(
            f"max_slots of {', '.join(limited)} is left out: the format of {dialect.title} has no field for it."
        )
    counts = {host.slots for host in hosts if host.slots is not None}
    if counts and "slots" not in dialect.carries:
        notes.append(
            f"The format of {dialect.title} has no field for slots. Start with -ppn {counts.pop()}."
            if len(counts) == 1
            else f"The format of {dialect.title} has no field for slots, and the hosts differ in theirs. "
            "Use --to machinefile."
        )
    return dialect.write(hosts), tuple(notes)


def _find_problems(hosts: Sequence[Host], dialect: Dialect) -> list[str]:
    problems = []
    users = [host.login for host in hosts if host.user]
    if users and "user" not in dialect.carries:
        problems.append(
            f"it has no field for the user of {', '.join(users)} (remove the user, and write 'User NAME' for that host "
            "in ~/.ssh/config)"
        )
    addresses = [host.name for host in hosts if ":" in host.name]
    if addresses and "ipv6" not in dialect.carries:
        problems.append(f"it does not allow the IPv6 address {', '.join(addresses)} (use the host's name)")
    bare = [host.name for host in hosts if host.slots is None]
    if bare and dialect.default_slots is not None:
        problems.append(f"it requires the slots of {', '.join(bare)} (use --slots-per-host N)")
    return problems
