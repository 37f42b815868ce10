"""Provides `run` and `run_fn`, decorators for a training function that continues after changes of the world."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from hvdkit.elastic.changes import find_changes
from hvdkit.elastic.state import State
from hvdkit.engine import runtime as engine
from hvdkit.errors import HorovodInternalError, HostsUpdatedInterrupt, LocalFailureError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def run(func: Callable[Concatenate[Any, Arguments], Result]) -> Callable[Concatenate[Any, Arguments], Result]:
    """Decorate a training function that continues when ranks are added, leave or fail.

    Use it as `@hvd.elastic.run`, as in Horovod.
    func: the training function; its first argument is the state. It is called after state.sync(), and called again from
    the last commit after each change of the ranks.
    The ranks can change under `hvdrun --elastic`, with hvdkit_ray.ElasticRayExecutor, and on Horovod's core under
    `horovodrun --min-np`. Elsewhere the function is called once, after state.sync(), and its exceptions are raised.
    Raises NotInitializedError before init(), and every exception of `func` except HorovodInternalError and
    HostsUpdatedInterrupt in a job whose ranks can change.
    """
    return run_fn(func)


def run_fn(
    func: Callable[Concatenate[Any, Arguments], Result], reset: Callable[[], object] | None = None
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Decorate as run() does, and call `reset` after each change of the ranks, before state.on_reset().

    Named as in Horovod. reset: called on the ranks that took part before the change, after they are connected again.
    Scripts for Horovod call shutdown() and init() in it; both have no effect there. It must not call collectives,
    because new ranks do not call it.
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
                    changes.agree()
                    if not synchronized:
                        state.sync()
                        changes.synchronized()
                    result = func(state, *args, **kwargs)
                    well = True
                    return result
                except SystemExit as error:
                    well = not error.code
                    raise
                except LocalFailureError as error:
                    raise (error.__cause__ or error) from None  # it ends this rank, as it would outside of a collective
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
