"""The interface between checkpoints and a framework's models, optimizers and samplers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Checkpointable(Protocol):
    """Named models, optimizers and samplers of one framework.

    files: names of the files that the result of copy() writes. framework: its name and version.
    """

    files: Sequence[str]
    framework: str

    def collect(self) -> None:
        """Gather sharded state on rank 0, for its copy(); collective."""

    def copy(self, folder: Path, *, during_epoch: bool) -> Callable[[], None]:
        """Copy the state now; return a function, for any thread, that writes the copy to the folder.

        folder: the folder to write to. during_epoch: False after the last step of an epoch.
        """

    def read(self, folder: Path) -> None:
        """Load the files of the folder on this rank. The files are not trusted: no code in them is executed."""

    def share(self) -> None:
        """Broadcast the state of rank 0; collective."""

    def digests(self) -> Mapping[str, str]:
        """Return a hash of each object's state by its name; hashes are equal on ranks whose states are equal."""

    def record(self, samples: int | None) -> None:
        """Count the samples of this rank's last step. samples: None if the caller does not know the number.

        Raises ValueError for None if a sampler's position is saved.
        """

    def read_random(self) -> dict[str, Any]:
        """Return the state of the framework's random generators on this rank, as JSON."""

    def set_random(self, state: dict[str, Any]) -> None:
        """Set the generators to a state of read_random()."""

    def settle(self) -> None:
        """Wait until asynchronous steps have ended, because collectives follow."""
