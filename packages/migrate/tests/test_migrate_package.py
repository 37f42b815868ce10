"""hvdkit-migrate is a distribution of its own: what it imports, what it has of hvdkit, and how hvdkit calls it."""

from __future__ import annotations

import ast
import graphlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from horovod_names import MODULES
from test_horovod_paths import PATHS

from hvdkit import cli

ROOT = Path(__file__).parents[3]
DISTRIBUTION = Path(__file__).parents[1]
PACKAGE = DISTRIBUTION / "hvdkit_migrate"
NAMES = PACKAGE / "hvdkit_names.json"
#: Modules of Horovod's whose packages only the tier of the integrations has.
INTEGRATIONS = (
    "ray spark spark.common spark.common.backend spark.common.store spark.keras spark.runner spark.torch".split()
)


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_it_needs_nothing_but_its_dependencies_and_the_tests_install_them() -> None:
    project = (DISTRIBUTION / "pyproject.toml").read_text()
    needed = re.findall(r'"([^"]+)"', re.findall(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)[0])
    imported = {name.partition(".")[0] for path in PACKAGE.rglob("*.py") for name in imports_of(path)}
    packages = {re.split("[<>=]", one)[0] for one in needed}
    assert imported - set(sys.stdlib_module_names) == {"hvdkit_migrate", *packages}
    assert set(needed) <= set((ROOT / "setup.cfg").read_text().split())


def test_no_files_of_it_import_each_other() -> None:
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    graph = {name: {one for one in imports_of(path) if one in files} for name, path in files.items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(files)
    assert max(len(path.read_text().splitlines()) for path in files.values()) <= 400


def test_it_knows_the_names_of_hvdkit() -> None:
    expected = {}
    modules = {part for path in (*MODULES.split(), *PATHS, *INTEGRATIONS) for part in (path, path.partition(".")[0])}
    for module in sorted(modules):
        first, *rest = module.split(".")
        package = f"hvdkit_{first}" if first in ("ray", "spark") else "hvdkit"
        folder = ROOT / "packages" / first / package if first in ("ray", "spark") else ROOT / "hvdkit" / first
        base = folder.joinpath(*rest)
        path = next((one for one in (base / "__init__.py", base.with_suffix(".py")) if one.is_file()), None)
        if path is None:
            continue  # a module that hvdkit makes when it is imported, or that it lacks
        lists = [
            node.value
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        is_written_out = bool(lists) and isinstance(lists[0], ast.List)
        expected[".".join([package, *rest] if package != "hvdkit" else [package, first, *rest])] = (
            sorted(ast.literal_eval(lists[0])) if is_written_out else []
        )
    if os.environ.get("HVDKIT_TEST_RECORD") == "1":
        rows = [f"  {json.dumps(module)}: {json.dumps(names)}" for module, names in expected.items()]
        NAMES.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    again = "HVDKIT_TEST_RECORD=1 pytest packages/migrate/tests/test_migrate_package.py"
    assert json.loads(NAMES.read_text()) == expected, again


def test_hvdkit_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import horovod.torch as hvd\n")
    assert cli.main(["migrate", "--check", str(script)]) == 1
    assert "a script for Horovod" in capsys.readouterr().out


def test_hvdkit_names_the_package_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda **_: ())
    assert cli.main(["migrate", "--check", "train.py"]) == 2
    assert "pip install -c constraints.txt ./packages/migrate" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_a_closed_pipe_ends_the_command_without_a_traceback_and_without_writing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import horovod.torch as hvd\n\nhvd.init()\n")
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        ended = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; from hvdkit_migrate.cli import main; sys.exit(main())",
                script,
                "--write",
            ],
            stdout=closed,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(DISTRIBUTION)},
            text=True,
        )
    assert (ended.returncode, ended.stderr) == (141, "")
    assert script.read_text().startswith("import horovod")
