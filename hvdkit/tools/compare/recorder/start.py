"""Imported by hvdkit.startup before the script's first framework, where HVDKIT_COMPARE says so."""

from __future__ import annotations

from types import ModuleType

from hvdkit.config import read_environment
from hvdkit.startup.after_import import after_import
from hvdkit.tools.compare.recorder.session import Session, open_session
from hvdkit.world import read_world


def start(settings: str) -> None:
    """Record what the frameworks do, from the moment they are imported."""
    world = read_world()
    session = open_session(settings, world.rank, world.size)

    def with_torch(_: ModuleType) -> None:
        from hvdkit.tools.compare.recorder.torch_steps import install

        install(session)

    def with_keras(_: ModuleType) -> None:
        from hvdkit.tools.compare.recorder.keras_fit import install

        install(session)

    after_import("torch", with_torch)
    after_import("keras", with_keras)


_SETTINGS = read_environment().get("HVDKIT_COMPARE", "")
if _SETTINGS:
    start(_SETTINGS)

__all__ = ["Session", "start"]
