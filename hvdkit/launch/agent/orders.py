"""What hvdrun may order for a rank's start. hvdrun's plan and the agent share this table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from .wire import Gone

#: The variables that hvdrun sets for a rank when all ranks have come, and its agent accepts, see arrivals.plan_orders.
#: All others come with the environment that the launcher has given the agent.
PLANNED_VARIABLES = frozenset(
    {
        *("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_osc", "OMPI_MCA_btl_tcp_if_include"),
        *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "FI_TCP_IFACE"),
        "HVDKIT_HOST_SLOTS",
    }
)


def find_unplanned(names: Iterable[str]) -> list[str]:
    """Name the variables that no plan of hvdrun sets."""
    return sorted(set(names) - PLANNED_VARIABLES)


def read_orders(payload: bytes) -> dict[str, Any]:
    """Read the payload of a GO frame. Raises Gone for what hvdrun does not send, so that the rank is not started."""
    try:
        orders = json.loads(payload)
        variables = dict(orders["variables"])
    except (ValueError, RecursionError, KeyError, TypeError):
        raise Gone(f"it has sent {payload[:80]!r} to start the rank with, which is not hvdrun's") from None
    unplanned = find_unplanned(variables)
    if unplanned or not all(isinstance(value, str) for value in variables.values()):
        names = ", ".join(unplanned) or "something that is no text"
        raise Gone(
            f"it has sent {names} to set for the rank, which hvdrun never does. Either somebody else speaks for it, or "
            "this host has another version of hvdkit"
        )
    return {**orders, "variables": variables}
