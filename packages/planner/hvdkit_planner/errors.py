"""Errors of hvdkit plan."""

from __future__ import annotations

from hvdkit.errors import HvdkitError


class PlanError(HvdkitError, ValueError):
    """hvdkit plan cannot use its input: a model, a cluster, a layout of ranks or a file."""
