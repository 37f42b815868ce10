"""Patch torch and Keras after the script has imported them; warn at exit if nothing was wrapped."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from hvdkit.log import logger
from hvdkit_wrap.places import called_from_hvdkit
from hvdkit_wrap.refusal import refuse
from hvdkit_wrap.session import active, current


def _torch(module: ModuleType) -> None:
    from hvdkit_wrap import torch_hooks

    torch_hooks.install()


def _keras(module: ModuleType) -> None:
    from hvdkit_wrap import keras_hooks

    keras_hooks.install()


#: Full name of the module -> the function that patches it.
ACTS: dict[str, Callable[[ModuleType], object]] = {"torch": _torch, "keras": _keras}


class RefuseHorovod:
    """Import finder that finds no module: it raises an error when the script imports Horovod, installed or not."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """See importlib.abc.MetaPathFinder."""
        if name == "horovod" and active() and not called_from_hvdkit():
            raise refuse(
                "the script imports Horovod, so it already trains on several ranks",
                "Start it with hvdrun --alias-horovod instead of --wrap.",
            )


def watch_the_end() -> None:
    """Warn at exit if the script imported a framework and nothing was wrapped."""

    def tell() -> None:
        failed = hasattr(sys, "last_type")
        if failed or not active() or not current().first or current().report.shown:
            return
        if "torch" in sys.modules or "keras" in sys.modules:
            logger.warning(
                "hvdrun --wrap: the script called neither step() of a torch optimizer nor fit() of Keras. Nothing was "
                "wrapped, and every rank did the same work. Start the script without --wrap; hvdkit migrate "
                "changes it for several ranks."
            )

    atexit.register(tell)
