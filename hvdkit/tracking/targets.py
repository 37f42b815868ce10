"""The targets of track(), and the opening of their writers on rank 0."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hvdkit.entry_points import find_entry_points, load_entry_point, name_package
from hvdkit.errors import HvdkitError, TrackError
from hvdkit.tracking.writer import Writer

Path = str | os.PathLike[str]
#: The option that a string stands for, where a mapping of options is possible too.
_MAIN_OPTION = {"wandb": "project", "mlflow": "uri"}
_NAMES = ("tensorboard", "wandb", "mlflow", "csv", "writers")

#: Group of entry points, `NAME = module:function`: track(writers={NAME: target}) calls function(target, **resume), with
#: the writer's own `resume` if another process continues its run, and gets a Writer with this name.
ENTRY_POINTS = "hvdkit.writers"


@dataclass(frozen=True)
class ResumedTarget:
    """The target of a foreign writer, and the options by which it continues a run."""

    target: Any
    resume: Mapping[str, str]


def target_of(value: Any) -> Any:
    """Return the target of a foreign writer without the options by which it continues a run."""
    return value.target if isinstance(value, ResumedTarget) else value


@dataclass(frozen=True)
class Targets:
    """The arguments of track(). hvdrun: its socket, if it gets the values too, see notify_launcher()."""

    tensorboard: Path | None = None
    wandb: str | Mapping[str, Any] | None = None
    mlflow: str | Mapping[str, Any] | None = None
    csv: Path | None = None
    writers: Mapping[str, Any] | None = None
    hvdrun: str | None = None

    def check(self) -> None:
        """Raise TrackError for an argument that is not a target, and if no target is given."""
        given = {name: getattr(self, name) for name in (*_NAMES, "hvdrun")}
        if all(value is None for value in given.values()):
            raise TrackError(
                "track() was told no place to write to. Pass tensorboard='runs/1', csv='run.csv', wandb='PROJECT' or "
                "mlflow='sqlite:///mlflow.db'."
            )
        writers = given["writers"]
        names = list(writers) if isinstance(writers, Mapping) else []
        if writers is not None and (not names or not all(isinstance(name, str) for name in names)):
            raise TrackError(f"track(): writers is {writers!r}; it must map names of writers to their targets.")
        if taken := sorted({*_NAMES} & {*names}):
            raise TrackError(f"track(): writers has {taken[0]}, which is an argument of its own: {taken[0]}=.")
        for name in ("tensorboard", "csv"):
            if given[name] is not None and (not isinstance(given[name], (str, os.PathLike)) or not str(given[name])):
                raise TrackError(f"track(): {name} is {given[name]!r}; it must be a path.")
        for name in ("wandb", "mlflow"):
            if given[name] is not None and (not isinstance(given[name], (str, Mapping)) or not given[name]):
                raise TrackError(f"track(): {name} is {given[name]!r}; it must be a name or a mapping of options.")

    def describe(self) -> tuple[tuple[str, str], ...]:
        """Describe the given targets, without their values, as (word, value): they must be equal on all ranks."""
        values = {name: _describe(getattr(self, name)) for name in _NAMES}
        if isinstance(self.writers, Mapping):
            values["writers"] = f"of the names {', '.join(sorted(map(str, self.writers)))}"
        return tuple((f"argument {name} of hvd.track()", value) for name, value in values.items())

    def at(self, places: Mapping[str, Any]) -> Targets:
        """Return the same targets at rank 0's places; see `places`."""
        return replace(self, **places)

    @property
    def places(self) -> dict[str, Any]:
        """The arguments of which all ranks use rank 0's value, by name: paths, and the targets of foreign writers."""
        return {"tensorboard": self.tensorboard, "csv": self.csv, "writers": self.writers}

    def following(self, resume: Mapping[str, Mapping[str, str]]) -> Targets:
        """Return the same targets, continuing existing runs. resume: of the writers, by name."""
        changed: dict[str, Any] = {}
        writers = dict(self.writers or {})
        for name, options in resume.items():
            if name in writers:
                writers[name] = ResumedTarget(target_of(writers[name]), options)
                changed["writers"] = writers
                continue
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
    for name, target in (targets.writers or {}).items():
        yield _open_foreign(name, target)
    if targets.hvdrun is not None:
        from hvdkit.tracking.writers.hvdrun_values import HvdrunValues

        yield HvdrunValues(targets.hvdrun)


def _open_foreign(name: str, target: Any) -> Writer:
    """Open the writer of an installed package. Raises TrackError, HvdkitError, and what the package raises."""
    entries = find_entry_points(ENTRY_POINTS)
    if name not in entries:
        known = f"; installed are {', '.join(entries)}" if entries else "; no package with writers is installed"
        raise TrackError(f"track(): writers has {name}, which no installed package has{known}.")
    resume = target.resume if isinstance(target, ResumedTarget) else {}
    make = load_entry_point(entries[name])
    try:
        writer: Writer = make(target_of(target), **resume)
    except HvdkitError:
        raise
    except (Exception, SystemExit) as error:  # whatever a package raises
        package = name_package(entries[name])
        raise TrackError(
            f"track(): the writer {name} of the package {package} cannot be opened: {type(error).__name__}: {error}"
        ) from error
    if flaw := _find_flaw(name, writer):
        if hasattr(writer, "close"):
            writer.close("FAILED")
        raise TrackError(f"track(): the writer of the package {name_package(entries[name])} {flaw}.")
    return writer


def _find_flaw(name: str, writer: Any) -> str:
    missing = [member for member in ("write", "close", "resume") if not hasattr(writer, member)]
    if missing:
        return f"has no {missing[0]}"
    if getattr(writer, "name", None) != name:
        return f"has the name {getattr(writer, 'name', None)!r}, not {name!r}"
    resume = writer.resume
    if not isinstance(resume, Mapping) or not all(isinstance(one, str) for pair in resume.items() for one in pair):
        return f"has the resume {resume!r}; it must map names of options to strings"
    return ""
