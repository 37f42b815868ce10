"""The interface between checkpoints and a framework's models, optimizers and samplers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Checkpointable(Protocol):
    """Named models, optimizers, samplers of one framework.

    files: that copy()'s result writes. framework: its name and version.
    """

    files: Sequence[str]
    framework: str

    def collect(self) -> None:
        """Bring to rank 0 what is divided among the ranks, for its copy(); collective."""

    def copy(self, folder: Path, *, during_epoch: bool) -> Callable[[], None]:
        """Copy the state now; returns what writes the copy into the folder, and may run in another thread.

        during_epoch: False after the last step of an epoch.
        """

    def read(self, folder: Path) -> None:
        """Load the files of the folder on this rank. They are not trusted: no code of theirs is executed."""

    def share(self) -> None:
        """Broadcast the state of rank 0; collective."""

    def digests(self) -> Mapping[str, str]:
        """A hash of each object's state, by its name: equal on ranks whose state is equal."""

    def record(self, samples: int | None) -> None:
        """Count samples that this rank has trained on in the last step. None: the caller does not know.

        Raises ValueError for None where a sampler's position is saved.
        """

    def read_random(self) -> dict[str, Any]:
        """The state of the framework's random generators on this rank, as JSON."""

    def set_random(self, state: dict[str, Any]) -> None:
        """Set the generators to a state of read_random()."""

    def settle(self) -> None:
        """Wait for asynchronous steps to end; collectives follow."""
