"""Keeps torch from importing its compiler where nothing is compiled.

Its optimizers import torch._dynamo when the first one is made, which takes a process 2.5 s, to ask it to leave them
alone. Whoever wants more of it gets the real one.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

TYPE_CHECKING = False  # importing typing takes milliseconds
if TYPE_CHECKING:
    from typing import Any

_NAME = "torch._dynamo"


class _Later(ModuleType):
    """Stands in for the compiler until more is wanted of it than to do nothing."""

    def disable(self, function: Any = None, *arguments: Any, **options: Any) -> Any:
        if function is not None:
            return function
        return self.__getattr__("disable")(*arguments, **options)  # which makes a decorator

    @staticmethod
    def graph_break() -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(_NAME) is self:
            if name in ("__file__", "__spec__"):  # which those want that look at all modules there are
                raise AttributeError(name)
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


def put_compiler_off() -> None:
    """Let this process import torch's compiler no sooner than it is needed."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _Later(_NAME)
