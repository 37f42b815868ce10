"""What the packages in packages/ import: nothing of one another, and of hvdkit what is listed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = sorted(path.parent for path in (Path(__file__).parents[2] / "packages").glob("*/pyproject.toml"))
#: Modules of hvdkit that every package may import.
GROUND = {"config", "errors", "log", "optional_import", "setting", "world"}
#: Package -> further modules that it imports. Lists get shorter only: hvdkit/engine and hvdkit/integrations are to
#: offer one small interface for engines, strategies, commands and workers.
FURTHER = {
    "federated": "engine.groups engine.named.submit engine.reduce_op transport.buffer transport.small_collectives",
    "horovod": "alias hook engine.api engine.groups engine.named.integers engine.named.joining engine.named.operation "
    "engine.planned.agreement engine.planned.plan engine.planned.reducer engine.provider engine.request "
    "engine.startup engine.strategy launch.cli.numbers launch.plan.mpi launch.plan.resolve_hosts launch.process "
    "tensorflow.compression tensorflow.variables tools.cuda_toolkit tools.doctor.collect.probes tools.installed "
    "torch.compression torch.layout torch.source transport.api transport.arithmetic transport.backend "
    "transport.buckets transport.buffer transport.coding.api transport.division transport.mpi.backend "
    "transport.mpi.library transport.part transport.polling transport.small_collectives",
    "migrate": "",
    "planner": "launch.cli.numbers launch.plan.resolve_hosts tools.bench.report tools.charts",
    "ray": "elastic.regrouping elastic.state engine.runtime integrations.ranks transport.select",
    "spark": "handshake integrations.ranks keras launch.agent.session_reaper launch.function_outcome "
    "launch.job.authenticated_server launch.process startup torch training.sharding transport.addresses",
}


def modules_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_imports_what_is_listed(package: Path) -> None:
    own = f"hvdkit_{package.name}"
    found, others = set(), set()
    for path in (package / own).rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path
        for module in modules_of(path):
            top = module.partition(".")[0]
            if top == "hvdkit":
                found.add(module.removeprefix("hvdkit."))
            elif top.startswith("hvdkit_") and top != own:
                others.add(module)
    assert not others
    assert found - GROUND == set(FURTHER[package.name].split())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_the_core_imports_no_package(package: Path) -> None:
    core = (Path(__file__).parents[2] / "hvdkit").rglob("*.py")
    name = f"hvdkit_{package.name}"
    assert not [path for path in core for module in modules_of(path) if module.partition(".")[0] == name]
