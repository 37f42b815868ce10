"""Training through changes of the world: `run`, around the function that trains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from hvdkit.elastic.changes import find_changes
from hvdkit.elastic.state import State
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
                state.on_reset()
        finally:
            changes.end(state, well=well)

    return cast(Callable[Concatenate[Any, Arguments], Result], train)
