"""hvdkit's ranks, in the interface that Lightning queries."""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment

from hvdkit.engine.basics import cross_rank, local_rank, rank, size
from hvdkit.errors import WorldError


class HvdkitEnvironment(ClusterEnvironment):
    """The world that hvd.init() has joined; the launcher has started all its ranks."""

    @property
    def creates_processes_externally(self) -> bool:
        """True: the launcher does so."""
        return True

    @property
    def main_address(self) -> str:
        """Raises WorldError: hvdkit's ranks connect without an address."""
        raise WorldError("hvdkit's ranks have no main address. Use strategy='ddp' for what needs one.")

    @property
    def main_port(self) -> int:
        """See main_address."""
        raise WorldError("hvdkit's ranks have no main port. Use strategy='ddp' for what needs one.")

    @staticmethod
    def detect() -> bool:
        """Return False: the environment is used only on request."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return size()

    def set_world_size(self, size: int) -> None:
        """Do nothing: Lightning computes the size from `devices` and `num_nodes`, which hvdkit does not need."""

    def global_rank(self) -> int:
        """Return this rank."""
        return rank()

    def set_global_rank(self, rank: int) -> None:
        """See set_world_size()."""

    def local_rank(self) -> int:
        """Return this rank's local rank."""
        return local_rank()

    def node_rank(self) -> int:
        """Return the number of this rank's host."""
        return cross_rank()
