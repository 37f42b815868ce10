"""Keeps torch from importing its compiler where nothing is compiled.

Its optimizers import torch._dynamo when the first one is made, which takes a process 2.5 s, to ask it to leave them
alone. Whoever wants more of it gets the real one. TESTS_STAND_INS=no replaces nothing.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

TYPE_CHECKING = False  # importing typing takes milliseconds
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

_NAME = "torch._dynamo"


def _disable_later(function: Any) -> Any:
    """What the compiler's own decorator says of a function, and asks for when something is compiled."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = None
    return function


class _Later(ModuleType):
    """Stands in for the compiler until more is wanted of it than to do nothing."""

    def disable(self, function: Any = None, *arguments: Any, **options: Any) -> Any:
        if function is not None:
            return function
        return _disable_later

    @staticmethod
    def reset() -> None:
        return None

    @staticmethod
    def graph_break() -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name == "__file__" or not self.__dict__.get("ready"):  # asked of all modules, or while it is made
            raise AttributeError(name)
        import importlib

        if sys.modules.get(_NAME) is self:
            sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


class _Finder:
    """Has `import torch._dynamo` find what stands in for it."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        if name != _NAME:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, _Finder)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _Later(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        module.__dict__["ready"] = True


def put_compiler_off() -> None:
    """Let this process import torch's compiler no sooner than it is needed."""
    if os.environ.get("TESTS_STAND_INS") != "no" and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
