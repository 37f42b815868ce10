"""The picture of a step on JAX, in the docstring of hvdkit/keras/sync_jax.py, has the names that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "hvdkit"


def _methods(folder: Path) -> set[str]:
    """Class.method of each class in a folder."""
    return {
        f"{node.name}.{method.name}"
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    }


def test_the_picture_of_a_step_on_jax_names_what_exists() -> None:
    picture = ast.get_docstring(ast.parse((ROOT / "keras" / "sync_jax.py").read_text())) or ""
    named = set(re.findall(r"\b[A-Z]\w+\.\w+", picture))
    assert len(named) >= 12
    assert named <= _methods(ROOT / "keras") | _methods(ROOT / "engine")


def test_what_jax_executes_is_named_run() -> None:
    """In these files the functions that a program calls begin with run, and those that add calls to it with trace."""
    found = []
    for name in ("sync_jax.py", "jax_in_place.py", "jax_device.py", "sharding/on_jax.py"):
        for node in ast.walk(ast.parse((ROOT / "keras" / name).read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            call = ast.unparse(node.func).rpartition(".")[2]
            if call in ("io_callback", "InPlace", "BufferCall"):
                first = node.args[0]
                if isinstance(first, ast.Call) and ast.unparse(first.func) == "functools.partial":
                    first = first.args[0]
                found.append((name, call, ast.unparse(first).rpartition(".")[2].lstrip("_")))
    assert len(found) == 11
    assert [each for each in found if not each[2].startswith("run")] == []
