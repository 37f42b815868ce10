"""Training through changes of the world: `run`, around the function that trains."""

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
    """Make a function that trains one that goes on when ranks come, end or fail: `@hvd.elastic.run`, as in Horovod.

    func: takes the state first; it is called after state.sync(), and from the last commit again after each change.
    Worlds change under `hvdrun --elastic`, and where Horovod's core is the engine under `horovodrun --min-np`.
    Elsewhere the world stays as it is: the function is called once after state.sync(), and what it raises is raised.
    Raises NotInitializedError before init(), and what `func` raises but for HorovodInternalError and
    HostsUpdatedInterrupt, in a world that may change.
    """

    @functools.wraps(func)
    def train(state: State, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        changes = find_changes()
        if changes is None:
            state.sync()
            return func(state, *args, **kwargs)
        changes.begin(state)
        state.world_may_change = True
        changed = synchronized = well = False
        lost: HorovodInternalError | None = None
        try:
            while True:
                try:
                    if changed:
                        changes.restart(lost=lost)
                        state.on_reset()
                    changes.settle()
                    if not synchronized:
                        state.sync()
                        changes.synchronized()
                    result = func(state, *args, **kwargs)
                    well = True
                    return result
                except HorovodInternalError as error:  # noqa: PERF203 (each time around takes seconds)
                    if engine.is_initialized():  # else it was the restart that failed, and the state is as it was
                        state.restore()
                    changed, lost, synchronized = True, error, False
                except HostsUpdatedInterrupt as interrupt:
                    changed, lost, synchronized = True, None, interrupt.skip_sync
        finally:
            changes.end(state, well=well)

    return cast(Callable[Concatenate[Any, Arguments], Result], train)
