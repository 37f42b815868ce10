"""The hosts of a job of HTCondor's parallel universe, from the contact file that its sshd.sh writes.

sshd.sh, which openmpiscript and mp2script source, starts an sshd on each node and writes a line for it on node 0: the
node's number, its host, the port, and more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import FoundHosts, Host, merge_hosts
from hvdkit.launch.hostfiles.names import check_name

_MORE = "request more with machine_count, or set them here with --slots-per-host"


def read_htcondor(environ: Mapping[str, str], slots: int | None = None) -> FoundHosts | None:
    """Read the contact file, with a slot for each node; None outside of the parallel universe.

    Raises LaunchError on a node other than 0, and without a contact file if there is more than one node.
    """
    node, nodes = environ.get("_CONDOR_PROCNO"), environ.get("_CONDOR_NPROCS", "1")
    if node is None or nodes == "1":
        return None
    if node != "0":
        raise LaunchError(
            f"HTCondor has started this on each of {nodes} nodes, and this is node {node}. Start hvdrun on node 0 "
            "only, as openmpiscript does with mpirun."
        )
    path = environ.get("CONDOR_CONTACT_FILE") or f"{environ.get('_CONDOR_SCRATCH_DIR', '.')}/contact"
    try:
        hosts = _parse_contacts(Path(path).read_text(errors="replace"), path)
    except (OSError, ValueError) as problem:  # ValueError: a null byte in the name
        raise LaunchError(
            f"HTCondor's contact file {path!r} cannot be read: {problem}. Source sshd.sh of HTCondor's libexec "
            "before hvdrun, or name the hosts with -H."
        ) from None
    if slots:
        hosts = tuple(replace(host, slots=slots) for host in hosts)
    return FoundHosts(hosts, f"HTCondor's {path}", more=_MORE, allocated=True)


def _parse_contacts(text: str, path: str) -> tuple[Host, ...]:
    hosts: dict[int, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        try:
            if len(words) < 2 or not (words[0].isascii() and words[0].isdecimal()):
                raise ValueError(f"{line[:100]!r} does not begin with the number of a node and its host")
            hosts[int(words[0])] = Host(check_name(words[1]))
        except ValueError as problem:
            raise LaunchError(f"{path}:{number}: {problem}. Name the hosts with -H.") from None
    if not hosts:
        raise LaunchError(f"{path} is empty: no sshd of HTCondor has started. Name the hosts with -H.")
    return merge_hosts(hosts[node] for node in sorted(hosts))
