"""Training through changes of the world: `run`, around the function that trains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from hvdkit.elastic.state import State
from hvdkit.engine import runtime as engine
from hvdkit.errors import HorovodInternalError, HostsUpdatedInterrupt
from hvdkit.log import logger

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def run(func: Callable[Concatenate[Any, Arguments], Result]) -> Callable[Concatenate[Any, Arguments], Result]:
    """Make a function that trains one that goes on when ranks come, end or fail: `@hvd.elastic.run`, as in Horovod.

    func: takes the state first; it is called after state.sync(), and from the last commit again after each change.
    Worlds change where Horovod's core is the engine, under `horovodrun --min-np`. Elsewhere the world stays as it is:
    the function is called once after state.sync(), and what it raises is raised.
    Raises NotInitializedError before init(), and what `func` raises but for HorovodInternalError and
    HostsUpdatedInterrupt, in a world that may change.
    """

    @functools.wraps(func)
    def train(state: State, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        changes = _changes()
        if changes is None:
            state.sync()
            return func(state, *args, **kwargs)
        changes.init()
        changes.register_listener(state)
        state.world_may_change = True
        synchronized = False
        try:
            while True:
                try:
                    engine.begin_generation()
                    if not synchronized:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    logger.warning("going back to the last commit: %s", error)
                    state.restore()
                    synchronized = False
                except HostsUpdatedInterrupt as interrupt:
                    logger.warning("hosts have changed")
                    synchronized = interrupt.skip_sync
                engine.restart()
                state.on_reset()
        finally:
            changes.remove_listener(state)

    return cast(Callable[Concatenate[Any, Arguments], Result], train)


def _changes() -> Any:
    """Who hears of changes of the world; None where it does not change."""
    horovod = engine.runtime("elastic.run").horovod
    return None if horovod is None else horovod.changes()
