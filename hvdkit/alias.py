"""Modules that provide, under the name a script imports, the public names of another package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

#: Marks hvdkit's alias of Horovod (hvdkit.alias_horovod): its module `horovod` and its finder have this attribute.
MARK = "hvdkit_alias"

_real: dict[str, ModuleType] = {}


def public_names_of(package: str) -> Callable[[str], Any]:
    """Make a module's `__getattr__` that finds the public names of a package when they are used."""

    def find(name: str) -> Any:
        module = importlib.import_module(package)
        if name == "__all__":
            return module.__all__
        if name not in module.__all__:
            raise AttributeError(f"{package} has no public name {name!r}")
        return getattr(module, name)

    return find


@contextmanager
def real_horovod() -> Iterator[None]:
    """Make `import horovod` inside the context import the installed Horovod, not hvdkit's alias.

    The modules imported so are kept and are the same the next time. Without the alias this does nothing. Other threads
    must not import horovod meanwhile.
    """
    finders = [finder for finder in sys.meta_path if getattr(finder, MARK, False)]
    if not finders:
        yield
        return
    aliases = _remove_modules()
    sys.modules.update(_real)
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in finders]
    try:
        yield
    finally:
        _real.update(_remove_modules())
        sys.modules.update(aliases)
        sys.meta_path[:] = [*finders, *(finder for finder in sys.meta_path if finder not in finders)]


def _remove_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "horovod"]
    return {name: sys.modules.pop(name) for name in names}
