"""Entry points of the packages in packages/, which the tests import from their folders without installing them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def plant_package(folder: Path, module: str, code: str, group: str, points: Mapping[str, str]) -> None:
    """Make a package that importlib.metadata and import find once the folder is on sys.path.

    module: its name and that of its distribution.
    code: of the module.
    group: of its entry points.
    points: the entry points, by name.
    """
    (folder / f"{module}.py").write_text(code)
    lines = "".join(f"{name} = '{value}'\n" for name, value in points.items())
    project = folder / f"{module}.toml"
    project.write_text(f"[project]\nname = '{module}'\n[project.entry-points.'{group}']\n{lines}")
    write_metadata(project, folder)


def write_metadata(project: Path, folder: Path) -> None:
    """Write the dist-info of a package, as pip would, so that importlib.metadata finds its entry points.

    project: its pyproject.toml. folder: of the dist-info, on sys.path.
    """
    table: dict[str, Any] = tomllib.loads(project.read_text())["project"]
    information = folder / f"{table['name'].replace('-', '_')}-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {table['name']}\nVersion: 0\n")
    groups = {"console_scripts": table.get("scripts", {}), **table.get("entry-points", {})}
    lines = [
        line for group, names in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()))
    ]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
