"""Calls functions right after a module was imported, whichever code imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Act = Callable[[ModuleType], object]


def after_import(name: str, act: Act) -> None:
    """Call `act` with the module of this full name right after its import; at once if it is imported already.

    An exception of `act` is raised from the import. Several functions are called in the order of registration.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        act(module)
        return
    _FINDER.waiting.setdefault(name, []).append(act)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder:
    """Finds the awaited modules by the other finders, and makes their loaders call the registered functions."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Act]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self.waiting)
                return spec  # type: ignore[no-any-return]
        return None


class _Loader:
    """Runs another loader, then the registered functions."""

    def __init__(self, loader: Any, waiting: dict[str, list[Act]]) -> None:
        self._loader, self._waiting = loader, waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for act in self._waiting.pop(spec.name, []):
            act(sys.modules.get(spec.name, module))


_FINDER = _Finder()
