"""`run` and `run_fn`: decorators by which a training function goes on through changes of the world."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from hvdkit.elastic.changes import find_changes
from hvdkit.elastic.state import State
from hvdkit.engine import runtime as engine
from hvdkit.errors import HorovodInternalError, HostsUpdatedInterrupt

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def run(func: Callable[Concatenate[Any, Arguments], Result]) -> Callable[Concatenate[Any, Arguments], Result]:
    """Decorate a training function that is to go on when ranks come, leave or fail: `@hvd.elastic.run`, as in Horovod.

    func: its first argument is the state; called after state.sync(), and again from the last commit after each change.
    Worlds change under `hvdrun --elastic`, and where Horovod's core is the engine under `horovodrun --min-np`.
    Elsewhere the world stays as it is: the function is called once after state.sync(), and what it raises is raised.
    Raises NotInitializedError before init(), and what `func` raises but for HorovodInternalError and
    HostsUpdatedInterrupt, in a world that may change.
    """
    return run_fn(func)


def run_fn(
    func: Callable[Concatenate[Any, Arguments], Result], reset: Callable[[], object] | None = None
) -> Callable[Concatenate[Any, Arguments], Result]:
    """As run(); calls `reset` after each change of the world, before state.on_reset(). Horovod's name.

    reset: called on the ranks that were there before the change, in the new world. Scripts for Horovod call shutdown()
    and init() in it; both do nothing there. It must make no collective calls, as new ranks do not call it.
    """

    @functools.wraps(func)
    def train(state: State, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        changes = find_changes()
        if changes is None:
            state.sync()
            return func(state, *args, **kwargs)
        changes.begin(state)
        state.world_may_change = True
        synchronized = well = False
        lost: HorovodInternalError | None
        try:
            while True:
                try:
                    changes.settle()
                    if not synchronized:
                        state.sync()
                        changes.synchronized()
                    result = func(state, *args, **kwargs)
                    well = True
                    return result
                except HorovodInternalError as error:
                    state.restore()
                    lost, synchronized = error, False
                except HostsUpdatedInterrupt as interrupt:
                    lost, synchronized = None, interrupt.skip_sync
                changes.restart(lost=lost)
                if reset is not None:
                    with engine.stay():
                        reset()
                state.on_reset()
        finally:
            changes.end(state, well=well)

    return cast(Callable[Concatenate[Any, Arguments], Result], train)
