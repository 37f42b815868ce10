"""The targets of track(), and the opening of their writers on rank 0."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hvdkit.errors import TrackError
from hvdkit.tracking.writer import Writer

Path = str | os.PathLike[str]
#: The option that a string stands for, where a mapping of options is possible too.
_MAIN_OPTION = {"wandb": "project", "mlflow": "uri"}
_NAMES = ("tensorboard", "wandb", "mlflow", "csv")


@dataclass(frozen=True)
class Targets:
    """The arguments of track(). hvdrun: its socket, if it gets the values too, see notify_launcher()."""

    tensorboard: Path | None = None
    wandb: str | Mapping[str, Any] | None = None
    mlflow: str | Mapping[str, Any] | None = None
    csv: Path | None = None
    hvdrun: str | None = None

    def check(self) -> None:
        """Raise TrackError for an argument that is not a target, and if no target is given."""
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
        """Describe the given targets, without their values, as (word, value): they must be equal on all ranks."""
        return tuple((f"argument {name} of hvd.track()", _describe(getattr(self, name))) for name in _NAMES)

    def at(self, paths: Mapping[str, Path | None]) -> Targets:
        """Return the same targets with these paths, by name."""
        return replace(self, **paths)  # type: ignore[arg-type]

    @property
    def paths(self) -> dict[str, Path | None]:
        """The paths, by name."""
        return {"tensorboard": self.tensorboard, "csv": self.csv}

    def following(self, resume: Mapping[str, Mapping[str, str]]) -> Targets:
        """Return the same targets, continuing existing runs. resume: of the writers, by name."""
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
    """Open all targets or none. Raises MissingDependencyError, OSError, and what the libraries raise."""
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
