"""hvdkit's ranks, as Lightning asks for them."""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment

from hvdkit.engine.basics import cross_rank, local_rank, rank, size
from hvdkit.errors import WorldError


class HvdkitEnvironment(ClusterEnvironment):
    """The world that hvd.init() has joined; the launcher has started all ranks."""

    @property
    def creates_processes_externally(self) -> bool:
        """It does: see the class."""
        return True

    @property
    def main_address(self) -> str:
        """WorldError: hvdkit's ranks find each other without an address."""
        raise WorldError("hvdkit's ranks have no main address. Use strategy='ddp' for what needs one.")

    @property
    def main_port(self) -> int:
        """See main_address."""
        raise WorldError("hvdkit's ranks have no main port. Use strategy='ddp' for what needs one.")

    @staticmethod
    def detect() -> bool:
        """No: it is used where it was asked for."""
        return False

    def world_size(self) -> int:
        """Ranks of the job."""
        return size()

    def set_world_size(self, size: int) -> None:
        """Does nothing: Lightning computes it from `devices` and `num_nodes`, which hvdkit does not need."""

    def global_rank(self) -> int:
        """This rank."""
        return rank()

    def set_global_rank(self, rank: int) -> None:
        """See set_world_size()."""

    def local_rank(self) -> int:
        """This rank, of those of its host."""
        return local_rank()

    def node_rank(self) -> int:
        """The number of this rank's host."""
        return cross_rank()
