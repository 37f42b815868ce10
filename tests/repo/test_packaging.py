from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hvdkit

ROOT = Path(__file__).parents[2]


def read_setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def packages_in(text: str) -> set[str]:
    """The package names of a list of requirements, one a line."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {re.split(r"[<>=!~;\[ ]", line)[0].lower() for line in lines if line}


def test_the_version_stands_in_one_place() -> None:
    assert read_setup()["metadata"]["version"] == "attr: hvdkit.__version__"
    assert f"## {hvdkit.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_has_a_tested_version() -> None:
    setup = read_setup()
    asked = packages_in(setup["options"]["install_requires"])
    for extra in setup["options.extras_require"].values():
        asked |= packages_in(extra)
    assert asked - packages_in((ROOT / "constraints.txt").read_text()) == set()


def test_every_import_is_a_dependency() -> None:
    setup = read_setup()
    asked = packages_in(setup["options"]["install_requires"])
    for extra in setup["options.extras_require"].values():
        asked |= packages_in(extra)
    imported = set()
    for path in (ROOT / "hvdkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    built = {"horovod"}  # by `hvdkit build-horovod`
    assert imported - set(sys.stdlib_module_names) - {"hvdkit"} - built <= asked


def test_git_ignores_no_code() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    folders = ["hvdkit", "packages", "tests", "benchmarks", "examples"]
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--", *folders]
    ignored = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [path for path in ignored if path.endswith(".py") and "/build/" not in path] == []


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "hvdkit").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.slow
def test_a_wheel_has_examples_and_pages_and_no_file_that_is_gone(tmp_path: Path) -> None:
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / "hvdkit"
    package.mkdir()
    shutil.copy(ROOT / "hvdkit" / "__init__.py", package)
    (package / "old.py").touch()
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "first.py").touch()
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    (tmp_path / "docs" / "guides" / "first.md").touch()
    build = "from setuptools import build_meta; print(build_meta.build_wheel('wheels'))"
    names = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True, timeout=120)
        (wheel,) = (tmp_path / "wheels").iterdir()
        names.append(zipfile.ZipFile(wheel).namelist())
        (package / "old.py").unlink(missing_ok=True)
    assert "hvdkit/old.py" in names[0] and "hvdkit/old.py" not in names[1]
    # Which `hvdkit examples` and `hvdkit docs` look for in the package.
    assert {"hvdkit/examples/first.py", "hvdkit/documents/guides/first.md"} <= set(names[1])
    assert not (tmp_path / "build").exists()
