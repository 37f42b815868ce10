"""Connecting to the other ranks: reports of a rank that waits, and the end of the job where a rank fails alone.

The wait goes on inside libraries (MPI_Init waits in C for all ranks), so a thread reports it. hvdrun knows which ranks
are missing, by those that have come; without hvdrun each rank can only speak for itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from hvdkit.config import Config
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
from hvdkit.transport.part import Part
from hvdkit.transport.select import Connection, connect, open_transport
from hvdkit.world import World

Opener = Callable[[Config, Connection], tuple[World, Transport]]


def open_world(
    config: Config, part: Part | None = None, opener: Opener = open_transport
) -> tuple[World, Transport, Abort | None]:
    """Connect the ranks and open the transport between them; collective.

    From the connection on, an exception that this process does not catch ends the job: it may be this rank's alone.
    In an elastic world the backend is told of ranks whose loss only hvdrun has noticed. part: see connect(). opener:
    makes the transport; tests simulate hosts with it. Raises what connect() and open_transport() raise.
    """
    connection = connect(config, part)
    install_exception_hook(connection.world.label, connection.world.host, connection.abort)
    if config.elastic and connection.base is not None:
        on_message(LOST, connection.report_loss)
        listen_to_launcher(config.launcher_channel)
    world, transport = opener(config, connection)
    return world, transport, connection.abort


@contextlib.contextmanager
def arriving(
    config: Config, world: World, end: Callable[[int], object] = os._exit, *, part: Sequence[int] = ()
) -> Iterator[None]:
    """Within, this rank is in init(); that it has come out is told if no error ended it.

    world: as the launcher told it. part: ranks of the job that meet here, if those are not all. end: ends this process,
    and with it the job, after stall_shutdown_s.
    """
    if config.launcher_channel:
        notify_launcher(announce_init(config.stall_check_s, config.stall_shutdown_s, part), config.launcher_channel)
        yield
        notify_launcher(READY, config.launcher_channel)
        return
    times = [each for each in (config.stall_check_s, config.stall_shutdown_s) if each > 0]
    if world.size == 1 or not times:
        yield
        return
    ready = threading.Event()
    watch = threading.Thread(target=_watch, args=(config, world, part, ready, end), name="hvdkit-init", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ready.set()


def _watch(
    config: Config, world: World, part: Sequence[int], ready: threading.Event, end: Callable[[int], object]
) -> None:
    began, waited_s = time.monotonic(), 0.0
    check_s, shutdown_s = config.stall_check_s, config.stall_shutdown_s
    while True:
        due = min([waited_s + check_s] * (check_s > 0) + [shutdown_s] * (shutdown_s > 0))
        if ready.wait(began + due - time.monotonic()):
            return
        waited_s = time.monotonic() - began
        configure_logging(config.log_level, world.rank)
        logger.warning("%s", _describe(world, part, waited_s))
        if 0 < shutdown_s <= waited_s:
            logger.error("hvd.init() has timed out after stall_shutdown_s=%g s; ending the job.", shutdown_s)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            end(1)
            return


def _describe(world: World, part: Sequence[int], seconds: float) -> str:
    many = f"{world.size} ranks" if world.size else "ranks"
    among = f"All {many} that {world.launcher} started must call it."
    if part:
        ranks = ", ".join(map(str, part))
        among = f"The ranks {ranks} of the job (its argument comm) must all call it, and {START_MPI}."
    return (
        f"hvd.init() on rank {world.rank} (host {world.host}) has been waiting for other ranks for {seconds:.0f} s. "
        f"{among} Ranks that do not print this warning are missing. If hvdrun starts the job, it names the missing "
        "ranks and shows what they are doing."
    )
