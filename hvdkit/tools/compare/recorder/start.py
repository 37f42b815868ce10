"""Start of the recorder: hvdkit.startup imports this before the script runs, if HVDKIT_COMPARE is set."""

from __future__ import annotations

import json
from importlib import import_module

from hvdkit.config import read_environment
from hvdkit.startup.after_import import after_import
from hvdkit.tools.compare.recorder.session import Session
from hvdkit.world import read_world


def start(settings: str) -> None:
    """Install the recorder in each framework when the script imports it. settings: of Session, in JSON."""
    world = read_world()
    session = Session(world.rank, world.size, **json.loads(settings))
    after_import("torch", lambda _: import_module("hvdkit.tools.compare.recorder.torch_steps").install(session))
    after_import("keras", lambda _: import_module("hvdkit.tools.compare.recorder.keras_fit").install(session))


_SETTINGS = read_environment().get("HVDKIT_COMPARE", "")
if _SETTINGS:
    start(_SETTINGS)
