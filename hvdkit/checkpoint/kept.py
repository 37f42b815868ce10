"""What a framework's adapter knows how to keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Kept(Protocol):
    """Models, optimizers and the like, of one framework, under names.

    files: those that write() makes. framework: with its version.
    """

    files: Sequence[str]
    framework: str

    def copy(self, folder: Path, *, during_epoch: bool) -> Callable[[], None]:
        """Copy all of it now; what is returned writes the copy into the folder, in another thread.

        during_epoch: what follows an epoch's last step is still to be done.
        """

    def read(self, folder: Path) -> None:
        """Take what was written; it may come from anybody, and executes nothing."""

    def share(self) -> None:
        """Give all ranks what rank 0 has; collective."""

    def digests(self) -> Mapping[str, str]:
        """A hash of each thing, by its name: the same on two ranks where they hold the same."""

    def record(self, samples: int | None) -> None:
        """This rank has trained on so many samples more. None: the caller does not know.

        Raises ValueError for that where a sampler's position has to be kept.
        """

    def read_random(self) -> dict[str, Any]:
        """Where this rank's random numbers are, those of the framework, as JSON."""

    def set_random(self, state: dict[str, Any]) -> None:
        """Go on from there."""

    def settle(self) -> None:
        """Wait for steps that are under way, since collectives follow."""
