"""Modules that stand where a script expects names, and have them from elsewhere."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

#: What hvdkit's alias of Horovod (hvdkit.alias_horovod) is known by: an attribute of its module `horovod`, and of its
#: finder.
MARK = "hvdkit_alias"

_real: dict[str, ModuleType] = {}


def public_names_of(package: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module that has the public names of a package, looked up when they are used."""

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
    """Within, `import horovod` gives the one that is installed; what is imported so stays the same next time.

    Nothing happens where the name is not hvdkit's. Other threads must not import horovod meanwhile.
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
