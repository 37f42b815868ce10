"""`import horovod.torch` gives the module hvdkit.torch itself, under both names."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from hvdkit.alias import MARK
from hvdkit.aliasing.names import CALLS, MODULES, VERSION, refusal


def is_alias(module: ModuleType) -> bool:
    """Is this module `horovod` the alias of hvdkit?"""
    return MARK in vars(module)


class AliasFinder:
    """Finds horovod and all below it; see importlib.abc.MetaPathFinder."""

    hvdkit_alias = True

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of Horovod's. Raises ImportError with the reason if hvdkit does not have it."""
        if name.partition(".")[0] != "horovod":
            return None
        problem = refusal(name)
        if problem:
            raise ImportError(problem, name=name)
        loader = _Same(MODULES[name]) if name in MODULES else _Made()
        return ModuleSpec(name, loader, is_package=name not in MODULES)  # type: ignore[arg-type]


class _Same:
    """Loads a module of hvdkit's under the name of Horovod's; both names give the same object."""

    def __init__(self, theirs: str) -> None:
        self._theirs = theirs

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        try:
            module = importlib.import_module(self._theirs)
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("hvdkit_"):
                raise
            importlib.import_module(error.name.replace("_", ".", 1))  # raises the error with the package to install
            raise
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, and add stand-ins for calls that hvdkit does not have."""
        name = module.__spec__.name if module.__spec__ else ""
        module.__spec__ = self._spec
        if not hasattr(module, "__path__"):
            module.__path__ = []  # so that submodules are requested from the finder, whose error names a replacement
        for (owner, call), why in CALLS.items():
            if owner == name and not hasattr(module, call):
                setattr(module, call, refused_call(f"{owner}.{call}", why))


def refused_call(name: str, why: str) -> type:
    """Make a stand-in for a missing function or class: calling it or deriving from it raises ImportError."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ImportError(f"{name} is not in hvdkit, which replaces Horovod in this process: {why}.", name=name)

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__init_subclass__": classmethod(refuse)})


class _Package(ModuleType):
    """The package `horovod`: its submodules are loaded on first use."""

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        problem = refusal(f"{self.__name__}.{name}")
        if problem:
            raise AttributeError(problem)
        return importlib.import_module(f"{self.__name__}.{name}")


class _Run(ModuleType):
    """horovod.run, which is a function since Horovod 0.20, and before was a module with a function `run`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    @property
    def run(self) -> Any:
        from hvdkit.launch.run_api import run

        return run


class _Made:
    """Creates the modules without a counterpart in hvdkit: `horovod` and `horovod.run`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Run(spec.name) if spec.name == "horovod.run" else _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, MARK, True)
        module.__file__ = str(Path(__file__).parents[1] / "__init__.py")  # scripts log the path of their Horovod
        if module.__name__ == "horovod":
            module.__version__ = VERSION  # type: ignore[attr-defined]
