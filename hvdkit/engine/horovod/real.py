"""The Horovod that is installed, also where the name `horovod` has been given to hvdkit (hvdkit.alias_horovod)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

#: What hvdkit's alias is known by: an attribute of its module `horovod`, and of its finder.
_MARK = "hvdkit_alias"

_real: dict[str, ModuleType] = {}


@contextmanager
def real_horovod() -> Iterator[None]:
    """Within, `import horovod` gives the one that is installed; what is imported so stays the same next time.

    Nothing happens where the name is not hvdkit's. Other threads must not import horovod meanwhile.
    """
    finders = [finder for finder in sys.meta_path if getattr(finder, _MARK, False)]
    if not finders:
        yield
        return
    aliases = _take()
    sys.modules.update(_real)
    before = list(sys.meta_path)
    sys.meta_path[:] = [finder for finder in before if finder not in finders]
    try:
        yield
    finally:
        _real.update(_take())
        sys.modules.update(aliases)
        sys.meta_path[:] = [*finders, *(finder for finder in sys.meta_path if finder not in finders)]


def _take() -> dict[str, ModuleType]:
    """Take out of sys.modules what goes by Horovod's name."""
    names = [name for name in sys.modules if name == "horovod" or name.startswith("horovod.")]
    return {name: sys.modules.pop(name) for name in names}
