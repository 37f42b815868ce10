"""Records the time that training waits for data, by wrapping a framework's methods that fetch data.

Adapters choose these methods; see watch_loaders, watch_datasets and watch_fit.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from hvdkit.engine.observe.recording import RECORDER, clock


def time_method(owner: Any, name: str, loaders: str = "") -> None:
    """Count the time of a method as waiting for data, on all objects of the class `owner`.

    owner: the class. name: the method's name. loaders: name of these objects' attribute with the number of loading
    processes; "" if there is none.
    """
    method = getattr(owner, name)

    @functools.wraps(method)
    def timed(self: Any) -> Any:
        began = clock()
        try:
            return method(self)
        finally:
            _loaded(began, getattr(self, loaders) if loaders else -1)

    setattr(owner, name, timed)


def time_items(owner: Any, name: str) -> None:
    """Do as time_method(), for each item of the iterator that the method returns."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def timed(self: Any) -> Iterator[Any]:
        return _timed(method(self))

    setattr(owner, name, timed)


def _timed(items: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(items)
    while True:
        began = clock()
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            _loaded(began, -1)
        yield item


def _loaded(began: float, loaders: int) -> None:
    if threading.current_thread() is threading.main_thread():  # else data is loaded ahead, and training does not wait
        RECORDER.loading(began, clock(), loaders)
