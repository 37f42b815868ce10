"""Ranks that record trainings with planted mistakes, one after the other, for tests of `hvdkit compare`."""

from __future__ import annotations

from pathlib import Path

from compare_script import train

from hvdkit.tools.compare.recorder.session import Session
from hvdkit.tools.compare.recorder.torch_steps import install
from hvdkit.torch import init, rank, size


def record(folder: str, planted: tuple[str, ...], ranks: str | None = None) -> None:
    """Train and write the record of this rank into the folder. ranks: the folder whose batches one rank is to take."""
    init()
    session = Session(rank(), size(), folder=Path(folder), ranks=Path(ranks) if ranks else None, steps=5)
    with install(session):
        try:
            train(set(planted))
        except SystemExit:
            return
    session.write()
