"""What a process has between init() and shutdown(): its place in the world, its settings and its transport."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hvdkit.config import Config, read_config
from hvdkit.errors import NotInitializedError
from hvdkit.hook import install_exception_hook, uninstall_exception_hook
from hvdkit.log import configure_logging, logger
from hvdkit.transport import open_transport
from hvdkit.transport.base import Arithmetic, Transport
from hvdkit.world import World


@dataclass
class Runtime:
    """The state of an initialised process.

    lock: held around every blocking collective, so that threads of one rank cannot interleave theirs.
    """

    world: World
    config: Config
    transport: Transport
    process: int = field(default_factory=os.getpid)
    lock: threading.RLock = field(default_factory=threading.RLock)


_runtime: Runtime | None = None


def init(**settings: Any) -> Runtime:
    """Join the world that the launcher made; does nothing if this process has joined already.

    settings: fields of Config, which beat the environment.
    Raises WorldError if the launcher and MPI disagree, ConfigError for a bad setting, TransportError if the ranks
    cannot reach each other.
    """
    global _runtime
    if _runtime is not None:
        return _runtime
    config = read_config(**settings)
    world, transport, abort = open_transport(config)
    configure_logging(config.log_level, world.rank)
    install_exception_hook(world.rank, world.host, abort)
    logger.info("%d ranks on %d hosts, transport %s", world.size, world.cross_size or 1, transport.name)
    _runtime = Runtime(world, config, transport)
    return _runtime


def shutdown() -> None:
    """Leave the world; collective. init() may be called again. Does nothing in a process that has not joined."""
    global _runtime
    if _runtime is None:
        return
    runtime, _runtime = _runtime, None
    uninstall_exception_hook()
    for leave in _leaving:
        leave()
    runtime.transport.close()


def is_initialized() -> bool:
    """Has this process joined the world?"""
    return _runtime is not None


def runtime(call: str) -> Runtime:
    """What init() made. call: the name of the user's call, for the NotInitializedError raised without it."""
    if _runtime is None:
        raise NotInitializedError(call)
    return _runtime


def use_arithmetic(arithmetic: Arithmetic) -> None:
    """Let the transport add and cast with a framework's own functions, which are faster for narrow types."""
    runtime("use_arithmetic()").transport.arithmetic = arithmetic


_leaving: list[Callable[[], None]] = []


def on_shutdown(leave: Callable[[], None]) -> None:
    """Have `leave` called at the beginning of every shutdown(); it may make collective calls."""
    _leaving.append(leave)


def _at_exit() -> None:
    # Not shutdown(): that is collective, and a rank that ends early must not wait for the others here.
    if _runtime is not None and _runtime.process == os.getpid():
        _runtime.transport.leave()


atexit.register(_at_exit)
