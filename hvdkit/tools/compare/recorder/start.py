"""Start of the recorder: hvdkit.startup imports this before the script runs, if HVDKIT_COMPARE is set."""

from __future__ import annotations

from types import ModuleType

from hvdkit.config import read_environment
from hvdkit.startup.after_import import after_import
from hvdkit.tools.compare.recorder.session import Session, open_session
from hvdkit.world import read_world


def start(settings: str) -> None:
    """Install the recorder in each framework when the script imports it."""
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
