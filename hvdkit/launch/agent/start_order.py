"""What hvdrun may order for a rank's start. hvdrun's plan and the agent share this table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from .wire import HvdrunLost

#: The variables that hvdrun sets for a rank when all ranks have come, and its agent accepts; see plan_start_orders of
#: hvdkit/launch/plan/registration.py. All others come with the environment that the launcher has given the agent.
PLANNED_VARIABLES = frozenset(
    {
        *("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_osc", "OMPI_MCA_btl_tcp_if_include"),
        *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "FI_TCP_IFACE"),
        *("HVDKIT_HOST_SLOTS", "NCCL_HOSTID"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
        *("KERAS_DISTRIBUTION_JOB_ADDRESSES", "KERAS_DISTRIBUTION_NUM_PROCESSES", "KERAS_DISTRIBUTION_PROCESS_ID"),
        *("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "no_grpc_proxy"),
    }
)


def find_unplanned(names: Iterable[str]) -> list[str]:
    """Find the variables that hvdrun never sets."""
    return sorted(set(names) - PLANNED_VARIABLES)


def read_start_order(payload: bytes) -> dict[str, Any]:
    """Parse the payload of a GO frame. Raises HvdrunLost for one that hvdrun does not send."""
    try:
        orders = json.loads(payload)
        variables = dict(orders["variables"])
    except (ValueError, RecursionError, KeyError, TypeError):
        raise HvdrunLost(
            f"the start order is malformed: {payload[:80]!r}. Check that all hosts have the same hvdkit"
        ) from None
    unplanned = find_unplanned(variables)
    if unplanned or not all(isinstance(value, str) for value in variables.values()):
        names = ", ".join(unplanned) or "a value that is not a string"
        raise HvdrunLost(
            f"the start order sets {names}, which hvdrun never sets. This host has another version of hvdkit, or "
            "another process has altered the connection"
        )
    return {**orders, "variables": variables}
