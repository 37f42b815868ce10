"""What hvdrun has ranks do before the script: reached through PYTHONPATH, harmless to every other process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from package_entry_points import plant_package
from planned_job import plan_job

from hvdkit import startup
from hvdkit.errors import MissingDependencyError
from hvdkit.launch.agent.rank_identity import adapt_environment
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.startup import ENTRY_POINTS, SITE, modules_asked_for, plan_variables
from hvdkit.startup.after_import import after_import

ROOT = str(Path(SITE).parents[2])


def run_python(code: str, *places: Path | str, **variables: str) -> str:
    """What Python prints, started as a rank is, with these places on PYTHONPATH after the site folder."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([SITE, *map(str, places)]), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_path_begins_with_the_site_folder_and_keeps_the_users() -> None:
    assert plan_variables({}, {"PYTHONPATH": "/mine"}) == {}
    planned = plan_variables({"HVDKIT_WRAP": "1"}, {"PYTHONPATH": f"/mine:{SITE}:/other"})
    assert planned == {"HVDKIT_WRAP": "1", "PYTHONPATH": f"{SITE}:/mine:/other"}
    for before, after in ((None, SITE), ("", SITE), (":/mine", f"{SITE}::/mine"), ("/mine:", f"{SITE}:/mine:")):
        environ = {} if before is None else {"PYTHONPATH": before}  # an empty place is the working directory
        assert plan_variables({"HVDKIT_WRAP": "1"}, environ)["PYTHONPATH"] == after
        assert adapt_environment(environ, {}, 1)["PYTHONPATH"] == after
    with pytest.raises(ValueError, match="unknown variables HVDKIT_NOTHING"):
        plan_variables({"HVDKIT_NOTHING": "1"}, {})
    assert list(modules_asked_for({"HVDKIT_WRAP": "1", "HVDKIT_ALIAS_HOROVOD": "0"})) == ["hvdkit_wrap.begin"]


def test_hvdrun_sends_ranks_there() -> None:
    job = plan_job(parse_arguments(["-np", "2", "--alias-horovod", "true"]), {"PATH": os.environ["PATH"]})
    assert job.variables["HVDKIT_ALIAS_HOROVOD"] == "1" and job.variables["PYTHONPATH"] == SITE
    job = plan_job(parse_arguments(["-np", "2", "true"]), {"PATH": os.environ["PATH"]})
    assert "PYTHONPATH" not in job.variables


def test_the_next_sitecustomize_has_its_turn_and_nothing_of_hvdkit_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("seen = __name__\n")
    code = f"import sys, sitecustomize; print(sitecustomize.seen, 'hvdkit' in sys.modules, sys.path.count({SITE!r}))"
    assert run_python(code, tmp_path, ROOT, HVDKIT_ALIAS_HOROVOD="1").split() == ["sitecustomize", "False", "0"]


def test_a_start_happens_at_the_first_framework(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import sys; print('hvdkit.startup' in sys.modules)\n")
    code = "import json, torch, torch as again"
    assert run_python(code, tmp_path, ROOT, HVDKIT_WRAP="0", HVDKIT_ALIAS_HOROVOD="1").split() == ["True"]
    assert run_python(code, tmp_path, ROOT).split() == ["False"]


def test_a_python_without_hvdkit_says_so_when_it_matters(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "hvdkit.py").write_text("raise ModuleNotFoundError('no hvdkit', name='hvdkit')")
    code = "import torch; print('imported')"
    assert "hvdkit, which is not installed in this Python: " in run_python(
        "try:\n  import horovod\nexcept ImportError as e: print(e)", tmp_path, HVDKIT_ALIAS_HOROVOD="1"
    )
    assert "imported" in run_python(code, tmp_path, HVDKIT_ALIAS_HOROVOD="1")


def test_the_module_of_another_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    code = "import sys; print('torch' in sys.modules)\n"
    plant_package(tmp_path, "hvdkit_wrap", code, ENTRY_POINTS, {"HVDKIT_WRAP": "hvdkit_wrap"})
    assert run_python("import torch", tmp_path, ROOT, HVDKIT_WRAP="1").split() == ["False"]
    assert run_python("import torch", tmp_path, ROOT, HVDKIT_WRAP="0", HVDKIT_ALIAS_HOROVOD="1") == ""


def test_a_rank_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "find_entry_points", lambda group: {})
    startup.begin({"HVDKIT_WRAP": "0"})
    with pytest.raises(MissingDependencyError) as error:
        startup.begin({"HVDKIT_WRAP": "1"})
    assert str(error.value) == (
        f"--wrap is in the package hvdkit-wrap, which is not installed in this Python, {sys.executable}. Run, "
        "in a clone of hvdkit: pip install -c constraints.txt ./packages/wrap"
    )


def test_an_act_follows_the_import_of_its_module_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "awaited_package"
    package.mkdir()
    (package / "__init__.py").write_text("from awaited_package import part\nvalue = 1\n")
    (package / "part.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[tuple[str, bool]] = []
    after_import("awaited_package", lambda module: seen.append((module.__name__, hasattr(module, "value"))))
    after_import("awaited_package.part", lambda module: seen.append((module.__name__, True)))
    import awaited_package

    assert seen == [("awaited_package.part", True), ("awaited_package", True)]
    assert type(awaited_package.__loader__).__module__ == "_frozen_importlib_external"
    after_import("awaited_package", lambda module: seen.append(("at once", True)))
    assert seen[-1] == ("at once", True)
