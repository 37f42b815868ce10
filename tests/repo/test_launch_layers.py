"""The order of hvdkit/launch: which of its folders and files may import which, and what its plan may not do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from test_layers import FILES, NAMES, ROOT, imports_of, name_of, tree_of

# Folders of launch and files beside them, from the bottom up. Each imports from itself and from lines above its own, so
# that no two need each other. `__init__` is no floor: it makes hvdkit.launch callable.
FLOORS = {
    name: floor
    for floor, names in enumerate(
        (
            "agent hostfiles function_outcome",
            "process function_results",
            "allocations run_worker",
            "plan",
            "options facts launchers detect state",
            "plan_elastic elastic introspect",
            "plan_job run",
            "plan_start prepare",
            "start run_api",
            "cli",
            "__main__ run_launcher",
        )
    )
    for name in names.split()
}
#: What imports cli: programs, which `python -m` starts.
PROGRAMS = {"launch.__main__", "launch.run_launcher"}

#: The plan: functions of options and facts. They read, start and write nothing; `prepare` collects facts before.
PURE = [
    *sorted((ROOT / "launch" / "plan").glob("*.py")),
    *(ROOT / "launch" / f"{name}.py" for name in "options facts launchers plan_elastic plan_job plan_start".split()),
]
#: What the plan imports of the standard library: nothing with a clock, random numbers, processes, sockets or users.
STANDARD = "__future__ collections dataclasses enum fnmatch functools ipaddress re shlex typing".split()
#: Name -> its attributes that the plan may use; `Path` only of the file itself, for the agent's folder.
PARTS = {"os": {"path"}, "os.path": {"join", "normpath"}}
#: What the plan imports of modules that also read or act, none of which does. Those of settings take a mapping.
BORROWED = {
    "hvdkit.config": {"Config", "read_config", "read_settings"},
    "hvdkit.errors": {"LaunchError"},
    "hvdkit.gpu_vendors": {"NVIDIA", "find_vendor"},
    "hvdkit.launch.agent.host_info": {"PORT_COUNT", "format_cpus"},
    "hvdkit.launch.agent.wire": {"find_unplanned"},
    "hvdkit.launch.allocations.schedulers": {"find_incomplete_slurm_job"},
    "hvdkit.launch.hostfiles": {"AUTO", "FoundHosts", "Host", "format_hosts"},
    "hvdkit.package_settings": {"check_settings"},
    "hvdkit.setting": {"Settings"},
    "hvdkit.startup": {"plan_variables"},
    "hvdkit.suggestion": {"did_you_mean"},
    "hvdkit.world": {"HOROVODRUN_STORE", "HVDRUN_RUN_ID", "name_as_horovodrun"},
}
_CONFIG = ("read_config", "read_settings")


def read_graph() -> dict[str, set[str]]:
    """The modules of launch, as "launch.plan.job", and what each imports of launch."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        name = name_of(path).removesuffix(".__init__")
        if name.startswith("launch."):
            targets = {target.removeprefix("hvdkit.") for _, target in imports_of(path)}
            modules = {target if target in NAMES else target.rpartition(".")[0] for target in targets}
            graph[name] = {module for module in modules & NAMES if module.startswith("launch.")}
    return graph


def find_wrong_imports(graph: Mapping[str, set[str]]) -> list[str]:
    """The imports that are neither of the same folder nor of one below."""
    wrong = []
    for name, targets in sorted(graph.items()):
        here = name.split(".")[1]
        for target in sorted(targets):
            there = target.split(".")[1]
            if there != here and FLOORS[there] >= FLOORS[here]:
                wrong.append(f"{name} imports {target}")
    return wrong


def test_folders_of_launch_import_what_is_below() -> None:
    assert not find_wrong_imports(read_graph())


def test_each_folder_and_file_of_launch_has_a_floor() -> None:
    assert {name.split(".")[1] for name in read_graph()} == FLOORS.keys()


def test_contributing_lists_the_folders_of_launch_in_the_order_of_their_floors() -> None:
    rows = re.findall(r"^\| (`launch/[a-z_`, /]+) \|", (ROOT.parent / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    folders = [folder for row in rows for folder in re.findall(r"launch/(\w+)", row)]
    assert sorted(folders) == sorted({path.parent.name for path in FILES if path.parent.parent.name == "launch"})
    assert [FLOORS[folder] for folder in folders] == sorted((FLOORS[folder] for folder in folders), reverse=True)


def test_two_folders_that_need_each_other_are_found() -> None:
    graph = {
        "launch.run.runner": {"launch.elastic.monitor", "launch.state.ranks", "launch.run.output"},
        "launch.elastic.monitor": {"launch.state.ranks", "launch.introspect.metrics"},
        "launch.state.ranks": {"launch.elastic.options", "launch.plan.job"},
        "launch.prepare": {"launch.plan_job", "launch.start"},
    }
    assert find_wrong_imports(graph) == [
        "launch.elastic.monitor imports launch.introspect.metrics",
        "launch.prepare imports launch.start",
        "launch.state.ranks imports launch.elastic.options",
    ]


def test_only_programs_import_the_command_line() -> None:
    """hvdkit.launch() in Python makes no words of its options; what planning needs of cli belongs below it."""
    importers = {
        name
        for name, targets in read_graph().items()
        if not f"{name}.".startswith("launch.cli.") and any(f"{each}.".startswith("launch.cli.") for each in targets)
    }
    assert importers == PROGRAMS


def find_impure(path: Path, tree: ast.AST) -> Iterator[str]:
    """What a file of the plan imports or calls that may read, start or write something."""
    own = tuple(f"hvdkit.{name_of(each)}." for each in PURE)
    for line, name in imports_of(path) if path in PURE else read_imports(tree):
        module, _, imported = name.rpartition(".")
        allowed = name in PARTS or name == "pathlib.Path" or f"{name}.".partition(".")[0] in STANDARD
        if not allowed and not name.startswith(own) and imported not in BORROWED.get(module, ()):
            yield f"{line}: imports {name}"
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in PARTS:
            if node.attr not in PARTS[ast.unparse(node.value)]:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Name) and node.id == "Path":
            if ast.unparse(parents[node]) != "Path(__file__)":
                yield f"{node.lineno}: {ast.unparse(parents[node])}"
        elif isinstance(node, ast.Name) and node.id in ("print", "open", "input", "exec", "eval", "__import__"):
            yield f"{node.lineno}: {node.id}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _CONFIG and not node.args:
            yield f"{node.lineno}: {ast.unparse(node)} without variables"


def read_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of the absolute imports of a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((node.lineno, f"{module}{alias.name}") for alias in node.names)


def test_the_plan_reads_and_starts_nothing() -> None:
    wrong = [f"{path}:{problem}" for path in PURE for problem in find_impure(path, tree_of(path))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os\nx = os.environ", ["2: os.environ"]),
        ("import os\nx = os.path.join('a', 'b')\nos.path.exists(x)", ["3: os.path.exists"]),
        ("import time", ["1: imports time"]),
        ("def f():\n    from random import random", ["2: imports random.random"]),
        ("import secrets, subprocess", ["1: imports secrets", "1: imports subprocess"]),
        ("from pathlib import Path\nx = Path('/etc/hosts')", ["2: Path('/etc/hosts')"]),
        ("print('note')", ["1: print"]),
        (
            "from hvdkit.config import read_config\nread_config({})\nread_config()",
            ["3: read_config() without variables"],
        ),
        ("from hvdkit.launch.process import run_program", ["1: imports hvdkit.launch.process.run_program"]),
        ("from hvdkit.launch.detect.hosts import resolve", ["1: imports hvdkit.launch.detect.hosts.resolve"]),
        ("from hvdkit.launch.plan.job import Job\nimport re\nfrom collections.abc import Mapping", []),
    ],
)
def test_the_check_of_the_plan_sees(code: str, expected: list[str]) -> None:
    assert list(find_impure(Path("text"), ast.parse(code))) == expected
