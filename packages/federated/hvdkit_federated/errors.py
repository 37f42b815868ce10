"""Errors of federated averaging."""

from __future__ import annotations

from hvdkit.errors import HvdkitError


class FederatedError(HvdkitError, ValueError):
    """A round of federated training is impossible: wrong options, a wrong update of a client, or too few clients."""
