"""The law of imports: what packages/ and the optional rooms of the core import of hvdkit, beside its one door."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
#: Modules of hvdkit that every package may import.
GROUND = {"config", "errors", "log", "optional_import", "setting", "world"}
DOOR = "engine.api"
ADAPTERS = ("torch", "tensorflow", "keras")
#: Rooms of the core that import of the engine, the transport and the adapters only what a package may. test_layers.py
#: has what else they import.
ROOMS = sorted(room for room in ("strategies", "parallel", "balance", "tracking") if (ROOT / "hvdkit" / room).is_dir())
BEHIND_THE_DOOR = ("engine", "transport", *ADAPTERS)
#: Package or room -> further modules that it imports. Lists get shorter only: the door is to offer what they need.
FURTHER = {
    "federated": "",
    "horovod": "alias engine.named.integers hook launch.cli.numbers launch.detect.hosts launch.detect.mpi "
    "launch.process tensorflow.variables tools.cuda_toolkit "
    "tools.doctor.collect.probes tools.installed torch.layout "
    "transport.mpi.backend transport.mpi.library",
    "migrate": "",
    "planner": "launch.cli.numbers launch.detect.hosts tools.bench.report tools.charts",
    "ray": "elastic.regrouping elastic.state integrations.ranks transport.select",
    "spark": "handshake integrations.ranks launch.agent.session_reaper launch.function_outcome "
    "launch.state.authenticated_server launch.process startup training.sharding transport.addresses",
    "wrap": "gpu_vendors startup.after_import torch.autograd training.schedules training.sharding visible_gpus",
    "balance": "",
    "parallel": "",
    "strategies": "",
    "tracking": "engine.observe.totals",
}


def imports_of(path: Path) -> list[tuple[str, set[str]]]:
    """Each module of hvdkit that a file imports, without "hvdkit.", and the names that it uses of it."""
    return _find_imports(path.read_text())


@functools.cache  # the same files are compared with each of six packages
def _find_imports(text: str) -> list[tuple[str, set[str]]]:
    tree, found = ast.parse(text), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, {alias.name for alias in node.names}))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name
                parts = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute)]
                found.append((alias.name, {each.attr for each in parts if ast.unparse(each.value) == name}))
    return found


def public_names(module: str) -> set[str]:
    """The `__all__` of a package of hvdkit, as text; nothing for other modules."""
    path = ROOT / "hvdkit" / module.replace(".", "/") / "__init__.py"
    if not path.is_file():
        return set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {str(each.value) for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return set()


def goes_through_the_door(module: str, names: set[str]) -> bool:
    """Is it the door, or an adapter of which only public names are used?"""
    return module == DOOR or (
        module.startswith(ADAPTERS) and bool(public_names(module)) and names <= public_names(module)
    )


def goes_past_the_door(files: Path, behind: tuple[str, ...] | None = None) -> set[str]:
    """Modules of hvdkit that files of a folder import otherwise. behind: only those of these folders."""
    found = set()
    for path in files.rglob("*.py"):
        for module, names in imports_of(path):
            top, _, inside = module.partition(".")
            counts = top == "hvdkit" and (behind is None or inside.partition(".")[0] in behind)
            if counts and inside and not goes_through_the_door(inside, names):
                found.add(inside)
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_imports_what_is_listed(package: Path) -> None:
    own = package / f"hvdkit_{package.name}"
    assert goes_past_the_door(own) - GROUND == set(FURTHER[package.name].split())


@pytest.mark.parametrize("room", ROOMS)
def test_an_optional_room_imports_what_is_listed(room: str) -> None:
    assert goes_past_the_door(ROOT / "hvdkit" / room, BEHIND_THE_DOOR) == set(FURTHER[room].split())


def test_names_that_are_not_public_go_past_the_door(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import hvdkit.torch as hvd\nfrom hvdkit.keras import DistributedOptimizer\n"
        "from hvdkit.engine.api import Group\nhvd.allreduce(1)\n"
    )
    assert goes_past_the_door(tmp_path) == set()
    (tmp_path / "script.py").write_text(
        "import hvdkit.torch as hvd\nfrom hvdkit.keras import sync\nfrom hvdkit.engine.groups import Group\nhvd.sync\n"
    )
    assert goes_past_the_door(tmp_path) == {"torch", "keras", "engine.groups"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_packages_import_none_of_each_other(package: Path) -> None:
    own = f"hvdkit_{package.name}"
    for path in (package / own).rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path
        tops = {module.partition(".")[0] for module, _ in imports_of(path)}
        assert not {top for top in tops if top.startswith("hvdkit_")} - {own}


def test_the_core_imports_no_package() -> None:
    names = {f"hvdkit_{package.name}" for package in PACKAGES}
    core = (ROOT / "hvdkit").rglob("*.py")
    assert not [path for path in core for module, _ in imports_of(path) if module.partition(".")[0] in names]
