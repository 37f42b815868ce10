"""The order of hvdkit/launch: which of its folders may import which, and what its plan may not do."""

from __future__ import annotations

from collections.abc import Mapping

from test_layers import FILES, NAMES, imports_of, name_of

# Folder of launch -> floor. A folder imports from itself and from lower floors, so that no two need each other.
FLOORS = {
    "agent": 0,
    "hostfiles": 0,
    "allocations": 1,
    "plan": 2,
    "detect": 3,
    "state": 3,
    "elastic": 4,
    "introspect": 4,
    "run": 5,
    "cli": 6,
}
#: What imports cli: programs, which `python -m` starts.
PROGRAMS = {"launch.__main__", "launch.run_launcher"}


def read_graph() -> dict[str, set[str]]:
    """The modules of launch, as "launch.plan.job", and what each imports of launch."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        name = name_of(path).removesuffix(".__init__")
        if name.partition(".")[0] == "launch":
            targets = {target.removeprefix("hvdkit.") for _, target in imports_of(path)}
            modules = {target if target in NAMES else target.rpartition(".")[0] for target in targets}
            graph[name] = {module for module in modules & NAMES if module.startswith("launch.")}
    return graph


def floor_of(module: str) -> int | None:
    """The floor of a module's folder; None for the files beside the folders."""
    return FLOORS.get(module.split(".")[1]) if "." in module else None


def find_wrong_imports(graph: Mapping[str, set[str]]) -> list[str]:
    """The imports of a folder that are neither its own nor of one below."""
    wrong = []
    for name, targets in sorted(graph.items()):
        here = floor_of(name)
        for target in sorted(targets):
            there = floor_of(target)
            same = name.split(".")[1:2] == target.split(".")[1:2]
            if here is not None and there is not None and there >= here and not same:
                wrong.append(f"{name} imports {target}")
    return wrong


def test_folders_of_launch_import_what_is_below() -> None:
    assert not find_wrong_imports(read_graph())


def test_each_folder_of_launch_has_a_floor() -> None:
    folders = {path.parent.name for path in FILES if path.parent.parent.name == "launch"}
    assert folders == FLOORS.keys()


def test_only_programs_import_the_command_line() -> None:
    """hvdkit.launch() in Python makes no words of its options; what planning needs of cli belongs below it."""
    importers = {
        name
        for name, targets in read_graph().items()
        if not f"{name}.".startswith("launch.cli.") and any(f"{each}.".startswith("launch.cli.") for each in targets)
    }
    assert importers == PROGRAMS


def test_two_folders_that_need_each_other_are_found() -> None:
    graph = {
        "launch.run.runner": {"launch.elastic.survivors", "launch.state.ranks", "launch.run.output"},
        "launch.elastic.survivors": {"launch.state.ranks", "launch.introspect.metrics"},
        "launch.state.ranks": {"launch.elastic.options", "launch.launchers"},
    }
    assert find_wrong_imports(graph) == [
        "launch.elastic.survivors imports launch.introspect.metrics",
        "launch.state.ranks imports launch.elastic.options",
    ]
