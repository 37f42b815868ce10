"""The script's DataLoaders: many ranks record their batches, and one rank gets them joined."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from hvdkit.tools.compare.recorder.session import Patches, Session
from hvdkit.tools.compare.records import Loader

_NUMBER = "_hvdkit_compare_number"


def watch_loaders(session: Session, patches: Patches) -> None:
    """Intercept every iteration of every DataLoader that is made from now on."""
    loaders = _Loaders(session)
    init: Any = DataLoader.__init__
    iterate: Any = DataLoader.__iter__
    length: Any = DataLoader.__len__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.__dict__[_NUMBER] = loaders.count()

    def __iter__(self: Any) -> Any:
        number = self.__dict__.get(_NUMBER)
        if session.record.framework == "keras" or number is None:
            return iterate(self)
        return loaders.iterate(self, number, iterate)

    def __len__(self: Any) -> int:
        taken = loaders.lengths.get(self.__dict__.get(_NUMBER, -1))
        return int(length(self)) if taken is None else taken

    patches.put(DataLoader, "__init__", __init__)
    patches.put(DataLoader, "__iter__", __iter__)
    patches.put(DataLoader, "__len__", __len__)


class _Loaders:
    """The DataLoaders by number, in the order in which the script makes them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._made = 0
        self._iterated: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        if session.others:
            self.lengths = {one.number: one.batches for one in session.others[0].loaders}

    def count(self) -> int:
        """Return the number of a new one."""
        self._made += 1
        return self._made - 1

    def iterate(self, loader: Any, number: int, iterate: Any) -> Iterator[Any]:
        """Yield its batches, or the joined batches of all ranks on one rank."""
        session = self._session
        times = self._iterated[number] = self._iterated.get(number, -1) + 1
        keys = session.batches(number, times)
        given = ((key, session.joined(key)) for key in keys)
        own = (((number, times, index), batch) for index, batch in enumerate(iterate(loader)))
        for key, batch in given if keys else own:
            session.got(key, batch, _states(), partial(self._note, loader, number))
            yield batch

    def _note(self, loader: Any, number: int) -> None:
        known = self._session.record.loaders
        if loader.batch_size and all(one.number != number for one in known):
            try:
                samples, batches = len(loader.sampler), len(loader)
            except TypeError:  # it does not know
                return
            known.append(Loader(number, samples, loader.batch_size, bool(loader.drop_last), batches))


def _states() -> bytes:
    return torch.get_rng_state().numpy().tobytes()
