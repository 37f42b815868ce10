"""The benchmarks that hvdkit has aims for, and how each is run."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.rows import Row, read_rows
from hvdkit.launch.process import read_tail, run_into_file

_TAIL = 12  # lines of a part that failed


@dataclass(frozen=True)
class Part:
    """A benchmark module, with --json.

    command: its name and arguments. ranks: that hvdrun starts; 0 for a module that starts its own.
    needs: packages. root: whether it makes hosts of network namespaces. limit_s: seconds before it is ended.
    """

    name: str
    about: str
    command: Sequence[str]
    ranks: int = 2
    variables: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[str] = ("torch",)
    root: bool = False
    limit_s: float = 180.0


PARTS = (
    Part("step", "a training step, three models, two ranks of one host", ("benchmarks.step_time",)),
    Part("allreduce", "an allreduce of 16 to 256 MiB", ("benchmarks.allreduce",)),
    Part("small", "small allreduces, one and 200 at once", ("benchmarks.collectives",)),
    Part(
        "keras",
        "a training step of Keras 3 on TensorFlow",
        ("benchmarks.keras_step_time",),
        variables={"KERAS_BACKEND": "tensorflow"},
        needs=("tensorflow", "keras"),
    ),
    Part("sharded", "a training step with sharded optimizer state", ("benchmarks.sharded_step",)),
    Part("uneven", "three ranks, of which one is slow", ("benchmarks.uneven",), ranks=3),
    Part("start", "from the command to the first step", ("benchmarks.start",), ranks=0),
    Part("nodes", "two and four hosts over slow links", ("benchmarks.nodes",), ranks=0, root=True, limit_s=240.0),
    Part("recovery", "a rank dies; commits", ("benchmarks.recovery",), ranks=0),
    Part("memory", "the memory of a rank", ("benchmarks.memory",)),
)


@dataclass(frozen=True)
class Done:
    """What came of a part. state: "done", "failed" or "not run". why: what is to be said of the latter two."""

    name: str
    state: str
    why: str = ""
    where: str = ""
    seconds: float = 0.0
    rows: Sequence[Row] = ()


def run_part(part: Part, environ: Mapping[str, str]) -> Done:
    """Run a part to its end and read its rows; what fails in it is told and not raised."""
    if missing := why_not(part):
        return Done(part.name, "not run", missing)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        rows, output = Path(folder, "rows.json"), Path(folder, "output")
        code = run_into_file(
            build_command(part, rows), environ={**environ, **part.variables}, output=output, timeout_s=part.limit_s
        )
        seconds = time.monotonic() - began
        if code == 0 and rows.exists():
            where, read = read_rows(rows)
            return Done(part.name, "done", "", where, seconds, read)
        ended = f"ended with exit code {code}" if code is not None else f"took more than {part.limit_s:g} s"
        return Done(part.name, "failed", "\n    ".join([f"{ended}:", *read_tail(output, _TAIL)]), "", seconds)


def build_command(part: Part, rows: Path) -> list[str]:
    """The command of a part. rows: the file that it writes its rows to."""
    module = [sys.executable, "-m", *part.command, "--json", str(rows)]
    return [sys.executable, "-m", "hvdkit.launch", "-np", str(part.ranks), *module] if part.ranks else module


def why_not(part: Part) -> str:
    """What a part lacks here; "" if nothing."""
    if part.root and os.geteuid() != 0:
        return "needs root, to make hosts of network namespaces"
    missing = [package for package in part.needs if importlib.util.find_spec(package) is None]
    return f"needs {' and '.join(missing)}" if missing else ""
