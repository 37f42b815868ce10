"""Connecting to the other ranks: reports of a rank that waits, and the end of the job if a rank fails alone.

The wait happens inside libraries (MPI_Init waits in C for all ranks), so a thread reports it. hvdrun knows which ranks
are missing, because the others have reported to it; without hvdrun each rank can only report itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from hvdkit.config import Config
from hvdkit.errors import HorovodInternalError
from hvdkit.hook import install_exception_hook
from hvdkit.launcher_channel import (
    LOST,
    READY,
    START_MPI,
    announce_init,
    listen_to_launcher,
    notify_launcher,
    on_message,
)
from hvdkit.log import configure_logging, logger
from hvdkit.transport.api import Transport
from hvdkit.transport.backend import Abort
from hvdkit.transport.polling import watch_waits
from hvdkit.transport.rank_subset import RankSubset
from hvdkit.transport.select import Connection, connect, open_transport
from hvdkit.world import World, name_as_horovodrun

Opener = Callable[[Config, Connection], tuple[World, Transport]]
Entered = TypeVar("Entered")


def open_world(
    config: Config, subset: RankSubset | None = None, opener: Opener = open_transport
) -> tuple[World, Transport, Abort | None]:
    """Connect the ranks and open the transport between them; collective.

    Once the ranks are connected, an uncaught exception of this process ends the job: other ranks may not have it.
    In an elastic world, hvdrun's reports of lost ranks are forwarded to the backend, which may not have noticed them.
    subset: see connect(). opener: makes the transport; tests simulate hosts with it. Raises what connect() and
    open_transport() raise.
    """
    connection = connect(config, subset)
    install_exception_hook(connection.world.label, connection.world.host, connection.abort)
    if config.elastic and connection.base is not None:
        on_message(LOST, connection.base.report_loss)
        listen_to_launcher(config.launcher_channel)
    try:
        world, transport = opener(config, connection)
    except BaseException:
        if connection.base is not None:
            connection.base.close(idle=False)  # the other ranks do not wait for this rank then
        raise
    if config.elastic and subset is None and "HOROVOD_RANK" in os.environ:  # set by the program that started the ranks
        os.environ.update(_name_for_scripts(world))
    return world, transport, connection.abort


def _name_for_scripts(world: World) -> dict[str, str]:
    """Return the variables in which Horovod's scripts find their rank, which may differ from that in the last world."""
    words = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    return name_as_horovodrun({word: getattr(world, word) for word in words})


class NextWorld(Protocol):
    """Gets this process a rank in the next world from the program that starts the ranks; see enter_world()."""

    def check(self) -> None:
        """Raise HorovodInternalError if the world that this rank is entering has ended already."""

    def wait(self, lost: HorovodInternalError) -> None:
        """Wait for a rank in another world, and set its variables. Raises `lost` if waiting cannot help."""


_next_world: NextWorld | None = None


def set_next_world(next_world: NextWorld | None) -> None:
    """Make init() of this process enter the next world if the present world fails to form; None ends that."""
    global _next_world
    _next_world = next_world


def enter_world(join: Callable[[], Entered], leave: Callable[[], object]) -> Entered:
    """Return join(). If it fails after set_next_world(), call leave() to undo it, then join() the next world."""
    if _next_world is None:
        return join()
    while True:
        before = watch_waits(_next_world.check)
        try:
            return join()
        except HorovodInternalError as error:
            lost = error
        finally:
            watch_waits(before)
        leave()
        _next_world.wait(lost)


@contextlib.contextmanager
def arriving(
    config: Config, world: World, end: Callable[[int], object] = os._exit, *, subset: Sequence[int] = ()
) -> Iterator[None]:
    """Report to hvdrun that this rank entered init() and, on success, left it. Without hvdrun, warn of a long wait.

    config: the settings, with the channel to hvdrun.
    world: as the launcher described it.
    end: ends this process, and with it the job, after stall_shutdown_s.
    subset: the job ranks that connect here; () for all.
    """
    if config.launcher_channel:
        notify_launcher(announce_init(config.stall_check_s, config.stall_shutdown_s, subset), config.launcher_channel)
        yield
        notify_launcher(READY, config.launcher_channel)
        return
    times = [each for each in (config.stall_check_s, config.stall_shutdown_s) if each > 0]
    if world.size == 1 or not times:
        yield
        return
    ready = threading.Event()
    watch = threading.Thread(target=_watch, args=(config, world, subset, ready, end), name="hvdkit-init", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ready.set()


def _watch(
    config: Config, world: World, subset: Sequence[int], ready: threading.Event, end: Callable[[int], object]
) -> None:
    began, waited_s = time.monotonic(), 0.0
    check_s, shutdown_s = config.stall_check_s, config.stall_shutdown_s
    while True:
        due = min([waited_s + check_s] * (check_s > 0) + [shutdown_s] * (shutdown_s > 0))
        if ready.wait(began + due - time.monotonic()):
            return
        waited_s = time.monotonic() - began
        configure_logging(config.log_level, world.rank)
        logger.warning("%s", _describe(world, subset, waited_s))
        if 0 < shutdown_s <= waited_s:
            logger.error("hvd.init() has timed out after stall_shutdown_s=%g s; ending the job.", shutdown_s)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            end(1)
            return


def _describe(world: World, subset: Sequence[int], seconds: float) -> str:
    many = f"{world.size} ranks" if world.size else "ranks"
    among = f"All {many} that {world.launcher} started must call it."
    if subset:
        ranks = ", ".join(map(str, subset))
        among = f"The ranks {ranks} of the job (its argument comm) must all call it, and {START_MPI}."
    return (
        f"hvd.init() on rank {world.rank} (host {world.host}) has been waiting for other ranks for {seconds:.0f} s. "
        f"{among} Ranks that do not print this warning are missing. If hvdrun starts the job, it names the missing "
        "ranks and shows what they are doing."
    )
