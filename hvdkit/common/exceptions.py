"""Horovod's exceptions under its names; hvdkit's own are in hvdkit.errors."""

from hvdkit.errors import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
