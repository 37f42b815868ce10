"""The actor of a rank: it calls functions on the rank and, in an elastic job, receives its rank of each world."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdkit.elastic.regrouping import set_places
from hvdkit.elastic.state import HostUpdateResult
from hvdkit.engine.api import on_init
from hvdkit.errors import HorovodInternalError, RankLostError
from hvdkit.integrations.ranks import Offer, Store, call_function, enter_rank, find_gpu_variable, offer_store
from hvdkit.optional_import import optional_import
from hvdkit.transport.select import first_place
from hvdkit_ray.signs import send_heartbeats

ray = optional_import("ray")

#: Concurrency group of the methods of ElasticRank that are called while its function runs. Ray then runs the function
#: itself in a thread beside the main one.
CONTROL = "control"
#: Two threads: one waits for the next arrival, the other takes a notification or an assignment.
CONCURRENCY_GROUPS = {CONTROL: 2}


@dataclass(frozen=True)
class Arrival:
    """A worker that waits for its rank in the next world.

    offer: the store that it offers, its node and its GPUs.
    pid: its process.
    has_state: does it have the last commit?
    committed: has it made a commit in its last world?
    why: the reason for which that world ended; "" for a new worker.
    """

    offer: Offer
    pid: int
    has_state: bool = False
    committed: bool = False
    why: str = ""

    def describe(self) -> str:
        """Name the process and its node, for messages."""
        return f"process {self.pid} on node {self.offer.address}"


class Rank:
    """A worker of RayExecutor. index: the executor's number for it."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._store: Store | None = None
        self._executable: Any = None
        self._name = ""
        self._gpus = tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))

    def send_heartbeats(self, key: str, pause_s: float) -> None:
        """Report under this key that this worker runs, also while its function runs."""
        send_heartbeats(key, pause_s)

    def arrive(self) -> Arrival:
        """Offer a store, and describe this worker."""
        return Arrival(self._offer(), os.getpid())

    def _offer(self) -> Offer:
        self._store = offer_store()
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return Offer(self._index, node, address, self._store.port, self._gpus, gpu_variable=find_gpu_variable())

    def enter(self, variables: Mapping[str, str]) -> None:
        """Make this process a rank; only rank 0 keeps its store."""
        enter_rank(variables)
        self._name = f"rank {variables['RANK']} (process {os.getpid()} on node {ray.util.get_node_ip_address()})"
        if variables["RANK"] != "0":
            self._store = None

    def start_executable(self, cls: type | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Make the object on which execute() calls its functions."""
        self._executable = cls(*args, **kwargs) if cls is not None else None

    def execute(self, fn: Callable[[Any], Any], last: bool = False) -> Any:
        """Return fn(executable).

        last: leave the world after it.
        Raises what the function raises, once the other ranks know of the failure.
        """
        return call_function(fn, (self._executable,), last=last, dumps=ray.cloudpickle.dumps).get(self._name)


class ElasticRank(Rank):
    """A worker of ElasticRayExecutor. It implements SlotCounts for its process.

    answer() and the methods below it are called by the driver while the function runs.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._changed = threading.Condition()
        self._arrival: Arrival | None = None
        self._place: tuple[int, Mapping[str, str]] | None = None
        self._has_state = self._has_committed = self._has_entered = self._over = False
        self._world = 0
        self._ended: tuple[int, str] = (-1, "")
        self._announced_s = 0.0
        self._notify: Callable[[float, int], None] | None = None

    def take_part(self, fn: Callable[[Any], Any], world: int, variables: Mapping[str, str]) -> Any:
        """Enter a world and return what the function returns. Raises as execute()."""
        set_places(self)
        on_init(self._note_init)
        try:
            self._enter(world, variables)
            return self.execute(fn, last=True)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def answer(self) -> bool:
        """Show that this worker lives; returns whether it has called hvd.init() in its world."""
        return self._has_entered

    def next_arrival(self) -> Arrival | None:
        """Wait until this worker waits for its next rank and return its Arrival; None when its function has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._arrival is not None)
            arrival, self._arrival = self._arrival, None
            return arrival

    def assign(self, world: int, variables: Mapping[str, str]) -> None:
        """Assign this worker its rank in a world."""
        with self._changed:
            self._place, self._announced_s = (world, variables), 0.0  # workers announced before are in this world
            self._changed.notify_all()

    def end_world(self, world: int, why: str) -> None:
        """Note that a world has ended; a worker that has not entered it yet then gives up."""
        self._ended = world, why

    def check(self) -> None:
        self._note_init()
        world, why = self._ended
        if world >= self._world:
            raise RankLostError(why)

    def announce(self, when: float) -> None:
        """Make the training take in new workers at its next commit. when: by the driver's clock."""
        with self._changed:
            self._announced_s, notify = when, self._notify
        if notify is not None:
            notify(when, HostUpdateResult.added)

    def watch(self, notify: Callable[[float, int], None] | None) -> None:
        with self._changed:
            self._notify, when = notify, self._announced_s
        if notify is not None and when:
            notify(when, HostUpdateResult.added)

    def synchronized(self) -> None:
        self._has_state = True

    def committed(self) -> None:
        self._has_committed = True

    def wait(self, why: str) -> None:
        offer = replace(self._offer(), place=first_place())  # the GPU of its first local rank
        with self._changed:
            self._place = None
            self._arrival = Arrival(offer, os.getpid(), self._has_state, self._has_committed, why)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._place is not None)
            place = self._place
        if place is None:
            raise HorovodInternalError("This worker has got no place among the ranks.")
        self._enter(*place)

    def _enter(self, world: int, variables: Mapping[str, str]) -> None:
        self._world, self._has_committed, self._has_entered = world, False, False
        self.enter(variables)

    def _note_init(self) -> None:
        self._has_entered = True
