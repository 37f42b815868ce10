"""Writers of packages for hvd.track(writers=): a wrong one is named, and another process continues its run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from package_entry_points import plant_package

from hvdkit.errors import HvdkitError, TrackError
from hvdkit.tracking.targets import ENTRY_POINTS, Targets, open_writers

CODE = """
class Server:
    name = "server"

    def __init__(self, target, run="new"):
        self.target, self.run, self.resume = target, run, {"run": "7"}

    def write(self, rows): ...

    def close(self, end): ...

def sick(target):
    raise KeyError("cold")

def left(target):
    raise SystemExit(3)

class Mute(Server):
    write = property()

def make(name, resume):
    def made(target):
        writer = Server(target)
        writer.name, writer.resume = name, resume
        return writer
    return made

none = make("none", None)
text = make("text", "run-7")
number = make("number", {"run": 7})
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"server": "planted_server:Server", "mute": "planted_server:Mute", "other": "planted_server:Server"}
    points.update(gone="planted_server:Gone", sick="planted_server:sick", left="planted_server:left")
    points.update({name: f"planted_server:{name}" for name in ("none", "text", "number")})
    plant_package(tmp_path, "planted_server", CODE, ENTRY_POINTS, points)
    monkeypatch.syspath_prepend(tmp_path)


def test_another_process_continues_the_run(server: None) -> None:
    targets = Targets(writers={"server": "host:1"})
    (first,) = open_writers(targets)
    (second,) = open_writers(targets.following({first.name: first.resume}))
    found: list[Any] = [first, second]
    assert [(each.target, each.run) for each in found] == [("host:1", "new"), ("host:1", "7")]


@pytest.mark.parametrize(
    ("writers", "error", "message"),
    [
        (
            {"servant": 1},
            TrackError,
            "writers has servant, which no installed package has; installed are gone, left, mute",
        ),
        ({"mute": 1}, TrackError, "the writer of the package planted_server has no write"),
        ({"other": 1}, TrackError, "the writer of the package planted_server has the name 'server', not 'other'"),
        ({"sick": 1}, TrackError, "the writer sick of the package planted_server cannot be opened: KeyError: 'cold'"),
        ({"left": 1}, TrackError, "the writer left of the package planted_server cannot be opened: SystemExit: 3"),
        ({"none": 1}, TrackError, "planted_server has the resume None; it must map names of options to strings"),
        ({"text": 1}, TrackError, "planted_server has the resume 'run-7'; it must map"),
        ({"number": 1}, TrackError, "planted_server has the resume {'run': 7}; it must map"),
        ({"gone": 1}, HvdkitError, "the package planted_server cannot be loaded: AttributeError"),
    ],
)
def test_a_writer_that_cannot_be_used_is_named(
    server: None, writers: Mapping[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_writers(Targets(writers=writers))


@pytest.mark.parametrize(
    ("writers", "message"),
    [
        ({}, "must map names of writers to their targets"),
        ("json_lines", "must map names of writers to their targets"),
        ({1: "x"}, "must map names of writers to their targets"),
        ({"csv": "run.csv"}, "writers has csv, which is an argument of its own: csv="),
    ],
)
def test_what_names_no_writers_is_refused(writers: Any, message: str) -> None:
    with pytest.raises(TrackError, match=message):
        Targets(writers=writers).check()
