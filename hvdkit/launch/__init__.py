"""hvdrun: start the ranks of a command on hosts. Imports no framework and no MPI.

The module is callable: `hvdkit.launch(options, train)` calls `hvdkit.launch.run_api.launch`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Launch(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from hvdkit.launch.run_api import launch

        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Launch
