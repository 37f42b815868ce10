"""Ranks that record trainings with planted mistakes, one after the other, for tests of `hvdkit compare`."""

from __future__ import annotations

from importlib import import_module

from hvdkit.engine.basics import rank, size
from hvdkit.tools.compare.recorder.session import Session

#: Framework -> the script, what records it, and the module whose init() it calls.
_PARTS = {
    "torch": ("compare_script", "torch_steps", "hvdkit.torch"),
    "keras": ("compare_keras_script", "keras_fit", "hvdkit.keras"),
}


def record(framework: str, folder: str, planted: tuple[str, ...], ranks: str | None = None) -> None:
    """Train and write the record of this rank into the folder. ranks: the folder whose batches one rank is to take."""
    script, recorder, adapter = _PARTS[framework]
    import_module(adapter).init()
    session = Session(rank(), size(), folder=folder, ranks=ranks, steps=5)
    with import_module(f"hvdkit.tools.compare.recorder.{recorder}").install(session):
        try:
            import_module(script).train(set(planted))
        except SystemExit:
            return
    session.write()
