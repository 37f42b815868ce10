"""Hosts and their slots: from -H, and from files in every dialect there is. Text in, `Host` out; nothing is started."""

from hvdkit.launch.hosts.files import find_hostfile, parse_hostfile, read_hostfile
from hvdkit.launch.hosts.formats import AUTO, DIALECTS, find_dialect
from hvdkit.launch.hosts.horovod import parse_host_list
from hvdkit.launch.hosts.host import FoundHosts, Host, format_hosts, merge_hosts, settle_slots

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
    "read_hostfile",
    "settle_slots",
]
