"""Hosts and their slots, parsed from -H and from hostfiles. Text in, `Host` out; nothing is started."""

from hvdkit.launch.hostfiles.dialects import DIALECTS, find_dialect
from hvdkit.launch.hostfiles.names import FoundHosts, Host, complete_slots, format_hosts, merge_hosts
from hvdkit.launch.hostfiles.parsing import AUTO, find_hostfile, parse_host_list, parse_hostfile

__all__ = [
    "AUTO",
    "DIALECTS",
    "FoundHosts",
    "Host",
    "find_dialect",
    "find_hostfile",
    "format_hosts",
    "merge_hosts",
    "parse_host_list",
    "parse_hostfile",
    "complete_slots",
]
