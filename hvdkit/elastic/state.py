"""The state of a training, which is committed in memory, restored after an error and synchronized between ranks."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hvdkit.checkpoint.store import Store
from hvdkit.engine import runtime
from hvdkit.errors import CheckpointError, HostsUpdatedInterrupt


class HostUpdateResult:
    """The values of `result` in State.on_hosts_updated(), for changes of a job's hosts. Named as in Horovod."""

    no_update, removed, added, mixed = 0, 1, 2, 3


class Handler(Protocol):
    """Saves and restores an object that is not copied as a whole: a model, an optimizer. Its creation makes a copy."""

    def save(self) -> None:
        """Copy the object's current values."""

    def restore(self) -> None:
        """Set the object to the copied values."""

    def sync(self) -> None:
        """Broadcast rank 0's current values into the object; collective. Does not save."""


@runtime_checkable
class GatheringHandler(Protocol):
    """A Handler of an object that may be sharded among the ranks."""

    def gather(self) -> None:
        """Gather the values that the next save() copies; collective. The present copy is kept until then."""


class State(ABC):
    """The base class of states: commits, reset callbacks and changes of the world.

    bcast_object: returns rank 0's object on every rank; collective. get_rank: accepted as in Horovod, and not needed.
    """

    #: run() sets it if hosts may be added or leave.
    world_may_change = False
    #: commit() calls it after save(); run() sets it if commits are saved to a disk too.
    committed: Callable[[], None] | None = None

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int] | None = None) -> None:
        self._bcast_object = bcast_object
        self._reset_callbacks: list[Callable[[], None]] = []
        self._updates: list[tuple[float, int]] = []
        self._seen_s = 0.0

    @abstractmethod
    def save(self) -> None:
        """Copy all values in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Set all values to the last copy, of save() or sync()."""

    @abstractmethod
    def sync(self) -> None:
        """Broadcast rank 0's values and save them; collective."""

    def commit(self) -> None:
        """Call save(), then check_host_updates(); every rank calls this after the same step."""
        self.save()
        if self.committed is not None:
            self.committed()
        self.check_host_updates()

    def on_hosts_updated(self, timestamp: float, result: int) -> None:
        """Record that hosts have changed. result: 1 for removed, 2 for added, 3 for both. Named as in Horovod."""
        self._updates.append((timestamp, result))

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 knows of hosts that were added or will leave; collective.

        No effect in a job whose ranks cannot change.
        """
        if not self.world_may_change:
            return
        updates, self._updates = self._updates, []
        latest = max([self._seen_s, *(timestamp for timestamp, _ in updates)])
        results = 0
        for timestamp, result in updates:
            if timestamp > self._seen_s:
                results |= int(result)
        before, self._seen_s, results = self.tell((self._seen_s, latest, results))
        if self._seen_s > before:
            raise HostsUpdatedInterrupt(results == HostUpdateResult.removed)

    def open_store(self, directory: str) -> Store:
        """Open the store of all values, in a directory of checkpoints on a disk that survives the job. For subclasses.

        Raises CheckpointError for a state that cannot be written.
        """
        raise CheckpointError(f"A {type(self).__name__} has no way to be written to {directory}, or read from it.")

    def save_to(self, directory: str) -> None:
        """Write all values to a checkpoint; collective. Raises CheckpointError, on rank 0, if that is not possible."""
        self.start_saving(directory)()

    def start_saving(self, directory: str) -> Callable[[], None]:
        """Do as save_to(), but return as soon as all values are copied; collective.

        Returns a function that waits until the checkpoint is on the disk, and raises CheckpointError, on rank 0, if it
        could not be written. This function is not collective.
        """
        store = self.open_store(directory)
        store.save()
        return store.wait

    def load_from(self, directory: str) -> bool:
        """Load all values from the newest checkpoint; False if there is none. Collective. Raises as Store.load()."""
        store = self.open_store(directory)
        if not store.load():
            return False
        for name, value in store.values.items():
            setattr(self, name, value)
        return True

    def tell(self, value: Any) -> Any:
        """Return rank 0's value on every rank; collective."""
        return self._bcast_object(value)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Add functions that are called, in this order, after each change of the world."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call reset(), then the reset callbacks; run() calls this after a change of the world."""
        self._updates = []
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:  # noqa: B027 (optional)
        """Do nothing; subclasses may override it. Called after a change of the world, before sync()."""


class ObjectState(State):
    """A State of named values as attributes: `state = ObjectState(broadcast_object, epoch=0)`, `state.epoch += 1`.

    Values are saved as deep copies, so that changes in place are restored too; models and optimizers are saved by a
    Handler. A new value that is assigned to a name is saved by the next save(), commit() or sync().

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
        """Return the Handler of a value that is not copied as a whole; None for other values. For subclasses."""
        return None

    def save(self) -> None:
        runtime.wait_for_devices()
        for handler in self._handlers.values():  # before any copy: if a rank is lost here, all copies are of one commit
            if isinstance(handler, GatheringHandler):
                handler.gather()
        for handler in self._handlers.values():
            handler.save()
        self._saved = copy.deepcopy(self._plain())

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        self._put(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """See State.sync. All ranks get rank 0's current values, saved or not."""
        for handler in self._handlers.values():
            handler.sync()
        if plain := self._plain():
            self._put(self.tell(plain))
        self.save()

    def _plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names if name not in self._handlers}

    def present(self) -> dict[str, Any]:
        """Return the values that are not None, by name."""
        return {name: getattr(self, name) for name in self._names if getattr(self, name) is not None}

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

    if TYPE_CHECKING:  # the names of the constructor

        def __getattr__(self, name: str) -> Any: ...
