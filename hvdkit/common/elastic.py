"""Horovod's names for elastic training that is not tied to a framework."""

from hvdkit.elastic.run import run_fn
from hvdkit.elastic.state import HostUpdateResult, ObjectState, State
from hvdkit.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostUpdateResult", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]
