"""What a wrapped optimizer does with its gradients before it uses them."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hvdkit.engine import runtime as engine
from hvdkit.keras.backends import Reducer, open_reducer
from hvdkit.keras.settings import Settings, check_variables

_numbers = itertools.count()
_reductions: weakref.WeakSet[Reduction] = weakref.WeakSet()


class Reduction:
    """The gradients of one optimizer, on their way to all ranks.

    local_layers: layers whose gradients are left on this rank. scale_local: divide those by the number of ranks, as the
    average does with the others. passes_factor: what an average over accumulated passes is multiplied with, for a sum.
    """

    def __init__(
        self, settings: Settings, *, local_layers: Sequence[Any], scale_local: bool, passes_factor: float
    ) -> None:
        self.number = next(_numbers)  # the same on all ranks, as optimizers are wrapped in the same order
        self.process_set = settings.process_set
        self._settings, self._size = settings, settings.size
        self._reducer: Reducer | None = None
        self._prepared: Sequence[Any] = ()
        self._local_layers, self._scale_local, self._passes_factor = list(local_layers), scale_local, passes_factor
        self._local: set[int] = set()
        self._done = False
        self._variables: Sequence[Any] = ()
        _reductions.add(self)
        self.enter()

    def enter(self) -> None:
        """Take up the work among the ranks of the process set as it is now, after init()."""
        if self.process_set.process_set_id is None:  # it was added after an earlier init()
            return
        self._size = self._settings.size
        may_grow = engine.runtime("DistributedOptimizer()").config.elastic and self.process_set.included()
        if self._reducer is not None:
            self._reducer.enter()
        elif self._size > 1 or may_grow:
            self._reducer = open_reducer(self._settings)
            self.prepare(self._prepared)

    @property
    def is_traced_with_ranks(self) -> bool:
        """Do compiled steps hold how many ranks there were? Then they are to be compiled anew in another world."""
        local = self._scale_local and bool(self._local or self._local_layers)
        return local or engine.runtime("a compiled step").horovod is not None

    def add_local(self, variable: Any) -> None:
        """Leave the gradient of this variable on this rank."""
        self._local.add(id(variable))

    def prepare(self, variables: Sequence[Any]) -> None:
        """These will be trained, without accumulation. TypeError for one that no gradients can be summed of."""
        if self._reducer is not None:
            check_variables(self.shared(variables))
        self._prepared = variables
        if self._reducer is not None and variables and not self._local and not self._local_layers:
            self._reducer.prepare(variables)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce what is to be applied now; collective, unless an outer optimizer has done so."""
        return self._reduce(gradients, variables, lambda reducer, some, theirs: reducer.reduce(some, theirs))

    def reduce_window(self, gradients: Sequence[Any], due: Callable[[], Any]) -> list[Any]:
        """Reduce the averages of a window, of the variables named by `window_of`; see Reducer.reduce_window."""
        reduced = self._reduce(
            gradients, self._variables, lambda reducer, some, theirs: reducer.reduce_window(some, theirs, due)
        )
        if self._passes_factor != 1.0:
            reduced = [None if one is None else one * self._passes_factor for one in reduced]
        return reduced

    def _reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        act: Callable[[Reducer, Sequence[Any], Sequence[Any]], list[Any]],
    ) -> list[Any]:
        result = list(gradients)
        if self._done or self._reducer is None:
            return result
        local = self._local_ids()
        shared = [at for at, one in enumerate(variables) if id(one) not in local]
        for at, one in enumerate(result):
            if id(variables[at]) in local and one is not None and self._scale_local:
                result[at] = one / self._size
        if shared:
            reduced = act(self._reducer, [result[at] for at in shared], [variables[at] for at in shared])
            for at, one in zip(shared, reduced, strict=True):
                result[at] = one
        return result

    def _local_ids(self) -> set[int]:
        return self._local | {id(one) for layer in self._local_layers for one in layer.trainable_variables}

    def shared(self, variables: Sequence[Any]) -> list[Any]:
        """Those of the variables whose gradients are reduced."""
        local = self._local_ids()
        return [one for one in variables if id(one) not in local]

    def agree(self, flag: Any) -> Any:
        """Is a scalar bool true on all ranks? Collective, unless the gradients it was made of are reduced already."""
        return flag if self._done or self._reducer is None else self._reducer.agree(flag)

    @contextmanager
    def done_after(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Iterator[list[Any]]:
        """Reduce now; what is called in here, with the result, does not do it again."""
        reduced = self.reduce(list(gradients), variables)
        before, self._done = self._done, True
        try:
            yield reduced
        finally:
            self._done = before

    @contextmanager
    def window_of(self, variables: Sequence[Any]) -> Iterator[None]:
        """In here the gradients of these variables are accumulated, and at the end of a window reduced."""
        self._variables = variables
        try:
            yield
        finally:
            self._variables = ()

    def close(self) -> None:
        """Free the buckets; collective."""
        if self._reducer is not None:
            self._reducer.close()


def _close_all() -> None:
    for one in sorted(_reductions, key=lambda reduction: reduction.number):
        one.close()


def _enter_all() -> None:
    # One that only waits to be collected would be counted on some ranks and not on others, which wait for it then.
    if _reductions:
        gc.collect()
    for one in sorted(_reductions, key=lambda reduction: reduction.number):
        one.enter()


engine.on_shutdown(_close_all)
engine.on_init(_enter_all)
