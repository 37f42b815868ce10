"""What a training is at a moment: kept in memory, taken back after an error, and the same on every rank."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hvdkit.errors import CheckpointError, HostsUpdatedInterrupt


class HostUpdateResult:
    """How the hosts of a job have changed: the `result` of State.on_hosts_updated(). Horovod's names and numbers."""

    no_update, removed, added, mixed = 0, 1, 2, 3


class Handler(Protocol):
    """Keeps one thing that cannot be copied as a whole: a model, an optimizer. Made with the thing as it is saved."""

    def save(self) -> None:
        """Keep a copy of what the thing is now."""

    def restore(self) -> None:
        """Make the thing what it was when it was saved last."""

    def sync(self) -> None:
        """Make the thing what it is on rank 0; collective. Does not save."""


class State(ABC):
    """What commit, callbacks and changes of the world have in common, whatever is kept.

    bcast_object: returns rank 0's object on every rank; collective. get_rank: accepted as in Horovod, and not needed.
    """

    #: Set by run() where hosts may come and go.
    world_may_change = False
    #: Called by commit() when it has saved; set by run() where commits are kept on a disk too.
    committed: Callable[[], None] | None = None

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int] | None = None) -> None:
        self._bcast_object = bcast_object
        self._reset_callbacks: list[Callable[[], None]] = []
        self._heard: list[tuple[float, int]] = []
        self._seen = 0.0

    @abstractmethod
    def save(self) -> None:
        """Keep a copy of everything in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to what was saved or synchronized last."""

    @abstractmethod
    def sync(self) -> None:
        """Make everything equal to rank 0's, and save it; collective."""

    def commit(self) -> None:
        """Save, then check_host_updates(); every rank calls it at the same step."""
        self.save()
        if self.committed is not None:
            self.committed()
        self.check_host_updates()

    def on_hosts_updated(self, timestamp: float, result: int) -> None:
        """Hosts have come or are to go, as this rank was told; result: 1 removed, 2 added, 3 both. Horovod's name."""
        self._heard.append((timestamp, result))

    def check_host_updates(self) -> None:
        """Look whether hosts have come or are to go; collective. Raises HostsUpdatedInterrupt, on all ranks, if so.

        Rank 0's word counts. In a world that does not change this does nothing.
        """
        if not self.world_may_change:
            return
        heard, self._heard = self._heard, []
        latest = max([self._seen, *(timestamp for timestamp, _ in heard)])
        results = 0
        for timestamp, result in heard:
            if timestamp > self._seen:
                results |= int(result)
        before, self._seen, results = self.tell((self._seen, latest, results))
        if self._seen > before:
            raise HostsUpdatedInterrupt(results == HostUpdateResult.removed)

    def save_to(self, directory: str) -> None:
        """Write everything to a checkpoint, on a disk that outlives the job; collective. For subclasses."""
        raise CheckpointError(f"A {type(self).__name__} has no way to be written to {directory}.")

    def start_saving(self, directory: str) -> Callable[[], None]:
        """save_to() that returns as soon as all is copied, if it can; what it returns waits until it is on the disk.

        Collective; what it returns is not, and raises CheckpointError, on rank 0, if it could not be written.
        """
        self.save_to(directory)
        return lambda: None

    def load_from(self, directory: str) -> bool:
        """Take everything from the newest checkpoint; was there one? Collective. For subclasses."""
        raise CheckpointError(f"A {type(self).__name__} has no way to be read from {directory}.")

    def tell(self, value: Any) -> Any:
        """Rank 0's value, on every rank; collective."""
        return self._bcast_object(value)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Have these called, in this order, after the world has changed: to scale the learning rate, for instance."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The world has changed: reset(), then the callbacks."""
        self._heard = []
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:  # noqa: B027 (for whom it concerns)
        """For subclasses: what is to be done after a change of the world, before sync()."""


class ObjectState(State):
    """Named values, which are attributes: `state = ObjectState(broadcast_object, epoch=0)`, then `state.epoch += 1`.

    Values are kept as deep copies, so what is changed in place comes back too; those with a Handler are left to it.
    Assigning to a name puts the new value in the old one's place. It is saved by the next save(), commit() or sync().

    bcast_object, get_rank: as for State.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int] | None = None, **values: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = tuple(values)
        self._handlers: dict[str, Handler] = {}
        for name, value in values.items():
            setattr(self, name, value)
        self._saved = copy.deepcopy(self._plain())

    def handler_for(self, value: Any) -> Handler | None:
        """What keeps this value, if it is not to be copied as a whole. For subclasses."""
        return None

    def save(self) -> None:
        """See State.save."""
        for handler in self._handlers.values():
            handler.save()
        self._saved = copy.deepcopy(self._plain())

    def restore(self) -> None:
        """See State.restore."""
        for handler in self._handlers.values():
            handler.restore()
        self._put(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """See State.sync. What was not saved counts too: it is rank 0's present values that all ranks get."""
        for handler in self._handlers.values():
            handler.sync()
        if plain := self._plain():
            self._put(self.tell(plain))
        self.save()

    def _plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names if name not in self._handlers}

    def _put(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name not in self._handlers:
                super().__setattr__(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name in self._names:
            handler = self.handler_for(value)
            if handler:
                self._handlers[name] = handler
            else:
                self._handlers.pop(name, None)
        super().__setattr__(name, value)

    if TYPE_CHECKING:  # the names that it was made with

        def __getattr__(self, name: str) -> Any: ...
