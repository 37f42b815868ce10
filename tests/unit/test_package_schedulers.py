"""A scheduler of a package is a value of hvdkit submit --scheduler."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from package_entry_points import plant_package

from hvdkit import cli
from hvdkit.errors import HvdkitError, SubmitError
from hvdkit.tools.submit.command import ENTRY_POINTS, load_scheduler

SUBMIT = ["submit", "--nodes", "3", "--tasks-per-node", "4", "--time", "2h", "--dry-run"]


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    plant_package(folder, "planted_flux", "", ENTRY_POINTS, {name: value})
    monkeypatch.syspath_prepend(folder)


def test_the_script_of_a_packages_scheduler_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(tmp_path, monkeypatch, "flux", "examples.extensions.flux_scheduler:FLUX")
    assert cli.main([*SUBMIT, "--scheduler", "flux", "--", "python", "train.py"]) == 0
    assert "# flux: --nodes=3 --nslots=3" in capsys.readouterr().out


def test_an_unknown_scheduler_is_refused_with_those_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, monkeypatch, "flux", "examples.extensions.flux_scheduler:FLUX")
    with pytest.raises(SubmitError, match=r"^--scheduler fluks is unknown. Choose one of slurm, pbs, lsf, k8s, flux,"):
        load_scheduler("fluks")


def test_two_packages_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, monkeypatch, "flux", "examples.extensions.flux_scheduler:FLUX")
    plant_package(tmp_path, "planted_other", "", ENTRY_POINTS, {"flux": "planted_other:FLUX"})
    with pytest.raises(HvdkitError, match=r"^the packages planted_\w+ and planted_\w+ both have .* flux"):
        load_scheduler("flux")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("flux", "examples.extensions.flux_scheduler:write_batch", "is not a Scheduler"),
        ("flux", "examples.extensions.flux_scheduler:NOTHING", "AttributeError: .*NOTHING"),
        ("slurm", "examples.extensions.flux_scheduler:FLUX", "has the name of one of hvdkit's"),
    ],
)
def test_a_package_that_cannot_be_used_is_named(
    name: str, value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, monkeypatch, name, value)
    with pytest.raises(HvdkitError, match=f"^the package planted_flux cannot be loaded: .*{message}") as error:
        load_scheduler(name)
    assert f"(entry point {name} of hvdkit.schedulers). Update or remove this package." in str(error.value)
    assert load_scheduler("lsf").title == "LSF", "another scheduler can be used nevertheless"


@pytest.mark.parametrize("sees_files", [True, False])
def test_files_are_checked_unless_jobs_run_in_images(
    sees_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"""
from dataclasses import replace
from examples.extensions.flux_scheduler import FLUX
IMAGES = replace(FLUX, sees_files={sees_files})
"""
    module = f"planted_images_{sees_files}"
    plant_package(tmp_path, module, code, ENTRY_POINTS, {"images": f"{module}:IMAGES"})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main([*SUBMIT, "--scheduler", "images", "--output", "logs/x", "--", "python", "/app/train.py"]) == 0
    warnings = capsys.readouterr().err
    assert ("'/app/train.py' does not exist" in warnings) == sees_files
    assert ("the folder 'logs' does not exist" in warnings) == sees_files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lambda job: job.nothing", "AttributeError: 'BatchJob' object has no attribute 'nothing'"),
        ("lambda job: None", r"write\(\) returned NoneType, not str"),
    ],
)
def test_a_fault_of_a_packages_scheduler_is_one_line(
    change: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"""
from dataclasses import replace
from examples.extensions.flux_scheduler import FLUX
BROKEN = replace(FLUX, write={change})
"""
    module = f"planted_broken_{len(change)}"
    plant_package(tmp_path, module, code, ENTRY_POINTS, {"broken": f"{module}:BROKEN"})
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main([*SUBMIT, "--scheduler", "broken", "--", "python", "train.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"the scheduler broken wrote no script: {message}", line)
