"""Errors of federated averaging."""

from __future__ import annotations

from hvdkit.errors import HvdkitError


class FederatedError(HvdkitError, ValueError):
    """A round of federated training cannot be done: options, a client's update, or too few clients."""
