"""Where track() is to write, and the opening of a writer for each place, on rank 0."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hvdkit.errors import TrackError
from hvdkit.tracking.writer import Writer

Path = str | os.PathLike[str]
#: What a string means where a mapping of options may be given as well.
_MAIN_OPTION = {"wandb": "project", "mlflow": "uri"}
_NAMES = ("tensorboard", "wandb", "mlflow", "csv")


@dataclass(frozen=True)
class Targets:
    """The arguments of track(); hvdrun: the socket to it, if it is to have the values too, see notify_launcher()."""

    tensorboard: Path | None = None
    wandb: str | Mapping[str, Any] | None = None
    mlflow: str | Mapping[str, Any] | None = None
    csv: Path | None = None
    hvdrun: str | None = None

    def check(self) -> None:
        """Raise TrackError for an argument that names no place, and where there is none."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if all(value is None for value in given.values()):
            raise TrackError(
                "track() was told no place to write to. Pass tensorboard='runs/1', csv='run.csv', wandb='PROJECT' or "
                "mlflow='sqlite:///mlflow.db'."
            )
        for name in ("tensorboard", "csv"):
            if given[name] is not None and (not isinstance(given[name], (str, os.PathLike)) or not str(given[name])):
                raise TrackError(f"track(): {name} is {given[name]!r}; it must be a path.")
        for name in ("wandb", "mlflow"):
            if given[name] is not None and (not isinstance(given[name], (str, Mapping)) or not given[name]):
                raise TrackError(f"track(): {name} is {given[name]!r}; it must be a name or a mapping of options.")

    def describe(self) -> tuple[tuple[str, str], ...]:
        """What all ranks must have given alike, as (word, value) of an operation: which places, not what they are."""
        return tuple((f"argument {name} of hvd.track()", _describe(getattr(self, name))) for name in _NAMES)

    def at(self, paths: Mapping[str, Path | None]) -> Targets:
        """The same places with these paths, by name."""
        return replace(self, **paths)  # type: ignore[arg-type]

    @property
    def paths(self) -> dict[str, Path | None]:
        """The paths, by name."""
        return {"tensorboard": self.tensorboard, "csv": self.csv}

    def following(self, resume: Mapping[str, Mapping[str, str]]) -> Targets:
        """The same places, with the runs that there are. resume: of the writers, by name."""
        changed: dict[str, Any] = {}
        for name, options in resume.items():
            given = getattr(self, name)
            changed[name] = {**({_MAIN_OPTION[name]: given} if isinstance(given, str) else given), **options}
        return replace(self, **changed)


def _describe(value: Any) -> str:
    if isinstance(value, (str, os.PathLike, Mapping)) and value:
        return "a path, a name or options"
    return repr(value)


def open_writers(targets: Targets) -> list[Writer]:
    """Open what was asked for, or nothing. Raises MissingDependencyError, OSError, and what the libraries raise."""
    with contextlib.ExitStack() as opened:
        writers = []
        for writer in _open_each(targets):
            opened.callback(writer.close, "FAILED")
            writers.append(writer)
        opened.pop_all()
        return writers


def _open_each(targets: Targets) -> Iterator[Writer]:
    if targets.csv is not None:
        from hvdkit.tracking.writers.csv_file import CsvFile

        yield CsvFile(targets.csv)
    if targets.tensorboard is not None:
        from hvdkit.tracking.writers.tensorboard_events import TensorBoardEvents

        yield TensorBoardEvents(targets.tensorboard)
    if targets.wandb is not None:
        from hvdkit.tracking.writers.wandb_run import WandbRun

        yield WandbRun(targets.wandb)
    if targets.mlflow is not None:
        from hvdkit.tracking.writers.mlflow_run import MlflowRun

        yield MlflowRun(targets.mlflow)
    if targets.hvdrun is not None:
        from hvdkit.tracking.writers.hvdrun_values import HvdrunValues

        yield HvdrunValues(targets.hvdrun)
