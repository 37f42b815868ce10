"""The floors of the house: what each folder may import, and what no file may do."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "hvdkit"
FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parsed where a test asks for it: each process of pytest-xdist collects this file, and one runs it."""
    return ast.parse(path.read_text())


# Folder -> floor. A folder imports from itself and from lower floors, never from one above or beside it.
FLOORS = {
    "": 0,  # errors, config, world, ...: the files beside these folders
    "startup": 1,
    "training": 1,
    "transport": 1,
    "engine": 2,
    "balance": 3,
    "checkpoint": 3,
    "parallel": 3,
    "profiling": 3,
    "tracking": 3,
    "elastic": 4,
    "strategies": 5,
    "common": 6,
    "torch": 6,
    "tensorflow": 6,
    "keras": 7,
    "lightning": 7,
    "launch": 8,
    "integrations": 9,
    "aliasing": 11,
    "alias_horovod": 12,
    "tools": 12,
    "cli": 13,
    "__main__": 14,
}

# Front doors: modules that scripts import by their public names, and that lend names from higher floors when a script
# asks for them. That makes no floor depend on a higher one: nothing of hvdkit uses what is lent, but who stands above.
# Front door -> the modules that it lends from.
FRONT_DOORS = {
    # hvdkit.launch with its options, and hvdkit.run, as horovod.run
    "__init__": {"launch", "launch.run_api", "launch.options", "launch.plan.elasticity"},
    "parallel.__init__": {"torch.parallel"},  # one name for users; what is pure stays on its floor
    # hvdkit.tensorflow.DistributedOptimizer is for Keras' optimizers, as Horovod's.
    "tensorflow.__init__": {"keras.tensorflow_optimizer"},
    "tensorflow.keras.__init__": {"keras"},  # Horovod's name of hvdkit.keras; tensorflow.elastic enters here too
    # Python itself calls it, through sitecustomize: a variable names what is to be imported before the script begins.
    "startup.__init__": {"alias_horovod", "aliasing.torch_mpi", "tools.compare.recorder.start"},
}

# What engine and elastic import of the transport: what is the same for all transports, the codings of what is sent
# between hosts, and the transport of a single rank. Nothing of the folders of a transport.
COMMON_TRANSPORT = (
    "addresses api arithmetic backend buckets buffer device division mailbox polling rank_subset select single "
    "request small_collectives coding between.select"
).split()
# Files that still import more. It gets shorter only.
ONE_TRANSPORT: dict[str, set[str]] = {}

FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "horovod"}
# Folder -> packages that nothing in it imports, at the top of a file or inside a function.
FORBIDDEN = {
    "": FRAMEWORKS | {"mpi4py"},
    "startup": FRAMEWORKS | {"mpi4py", "numpy"},
    "transport": FRAMEWORKS,
    "engine": FRAMEWORKS,
    "balance": FRAMEWORKS,
    "checkpoint": FRAMEWORKS,
    "parallel": FRAMEWORKS,
    "strategies": FRAMEWORKS,
    "elastic": FRAMEWORKS,
    "profiling": FRAMEWORKS,
    "tracking": FRAMEWORKS,
    "common": FRAMEWORKS,
    "launch": FRAMEWORKS | {"mpi4py", "numpy"},
    "integrations": FRAMEWORKS | {"mpi4py", "ray", "pyspark"},
    "torch": FRAMEWORKS - {"torch"},
    "tensorflow": FRAMEWORKS - {"tensorflow"},
    "lightning": FRAMEWORKS - {"torch"},
}

# Files that stand out of this, each for what the design says of it.
EXCEPTIONS = {
    "transport.gloo.library": {"torch"},  # torch.distributed carries Gloo; loaded when a transport is opened
}

MAY_READ_ENVIRONMENT = (
    "config.py",
    "engine/child_processes.py",
    "world.py",
    "launch/agent/",
    "startup/",
    "common/util.py",
    "engine/startup.py",
    "integrations/ranks.py",
    "torch/device/variables.py",
)
#: The first has a function of Horovod's that does just that. engine/startup.py keeps HOROVOD_RANK and the like true for
#: the scripts of elastic jobs. The third makes a rank of a process that runs already. The fourth marks a rank
#: for the processes that it starts. A constructor of torch takes no other argument for what the last sets.
MAY_WRITE_ENVIRONMENT = (
    "common/util.py",
    "engine/startup.py",
    "integrations/ranks.py",
    "engine/child_processes.py",
    "torch/device/variables.py",
)
MAY_PRINT = ("launch/", "tools/", "cli.py")


def folder_of(module: str) -> str:
    """The floor's name for a module below hvdkit: "engine" for "engine.buckets", "" for "config"."""
    first = module.partition(".")[0]
    return first if first in FLOORS else ""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, relative imports resolved."""
    package = ["hvdkit", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def test_imports_go_down_the_floors() -> None:
    wrong = []
    for path in FILES:
        here = folder_of(name_of(path))
        for line, name in imports_of(path):
            top, _, rest = name.partition(".")
            if top == "hvdkit" and rest:
                there = folder_of(rest)
                lent = any(rest.startswith(f"{module}.") for module in FRONT_DOORS.get(name_of(path), ()))
                if there != here and FLOORS[there] >= FLOORS[here] and not lent:
                    wrong.append(f"{path}:{line} imports {name}: {there!r} is not below {here!r}")
            elif top in FORBIDDEN.get(here, set()) - EXCEPTIONS.get(name_of(path), set()):
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


NAMES = {name_of(path).removesuffix(".__init__") for path in FILES}


def modules_named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name (below hvdkit) of each module that a text names, as import_module() and its tables do.

    Not of texts that are compared: `"hvdkit.alias_horovod" in sys.modules` imports nothing.
    """
    compared = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Compare) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in compared:
            inside = node.value.removeprefix("hvdkit.")
            if re.fullmatch(r"hvdkit(\.\w+)+", node.value) and {inside, inside.rpartition(".")[0]} & NAMES:
                yield node.lineno, inside
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            text = ast.unparse(node.args[0])
            if text.startswith("f'hvdkit."):
                pattern = re.sub(r"\{.*?\}", r"[\\w.]+", text[2:-1])
                yield from ((node.lineno, name) for name in sorted(NAMES) if re.fullmatch(pattern, f"hvdkit.{name}"))


def test_modules_that_are_named_in_texts_are_below_too() -> None:
    """import_module() is no way around the floors."""
    wrong = []
    for path in FILES:
        here = folder_of(name_of(path))
        for line, name in modules_named(tree_of(path)):
            there = folder_of(name)
            lent = name in FRONT_DOORS.get(name_of(path), ())
            if there != here and FLOORS[there] >= FLOORS[here] and not lent:
                wrong.append(f"{path}:{line} names {name}: {there!r} is not below {here!r}")
    assert not wrong, "\n".join(wrong)


def test_the_names_of_modules_are_seen() -> None:
    code = (
        "import_module('hvdkit.launch.run_api')\nTABLE = {'a': 'hvdkit.keras'}\n'hvdkit.launch' in sys.modules\n"
        "importlib.import_module(f'hvdkit.{name}.basics')\n'hvdkit.no_such_file'"
    )
    assert sorted(modules_named(ast.parse(code))) == [
        (1, "launch.run_api"),
        (2, "keras"),
        (4, "engine.basics"),
        (4, "keras.basics"),
        (4, "tensorflow.basics"),
        (4, "torch.basics"),
    ]


def test_engine_and_elastic_import_no_transport() -> None:
    assert not {"shared", "mpi", "gloo", "nccl"} & {common.partition(".")[0] for common in COMMON_TRANSPORT}
    found: dict[str, set[str]] = {}
    for path in FILES:
        if folder_of(name_of(path)) not in ("engine", "elastic"):
            continue
        for _, name in imports_of(path):
            inside = name.removeprefix("hvdkit.transport.")
            if inside != name and not f"{inside}.".startswith(tuple(f"{common}." for common in COMMON_TRANSPORT)):
                found.setdefault(name_of(path), set()).add(inside.rpartition(".")[0])
    assert found == ONE_TRANSPORT


def find_circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Sets of files each of which imports each other one, directly or through others (Warshall's closure)."""
    reach = {name: set(targets) for name, targets in graph.items()}
    for through in graph:
        for name in graph:
            if through in reach[name]:
                reach[name] |= reach[through]
    circles = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return [set(circle) for circle in circles if len(circle) > 1]


def test_no_files_import_each_other() -> None:
    """Imports for types count too: who reads one file of a circle has to read all of them."""
    graph: dict[str, set[str]] = {name: set() for name in NAMES}
    for path in FILES:
        name = name_of(path).removesuffix(".__init__")
        for _, target in imports_of(path):
            top, _, inside = target.partition(".")
            found = inside if inside in NAMES else inside.rpartition(".")[0]
            if top == "hvdkit" and found in NAMES and found != name:
                graph[name].add(found)
    assert not find_circles(graph)


def test_a_circle_of_three_is_found() -> None:
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_contributing_lists_the_folders_in_the_order_of_their_floors() -> None:
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", (ROOT.parent / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    folders = [folder for row in rows for folder in re.findall(r"`(\w+)`", row) if folder in FLOORS]
    assert {*folders} == FLOORS.keys() - {"", "__main__", "alias_horovod"}
    assert [FLOORS[folder] for folder in folders] == sorted((FLOORS[folder] for folder in folders), reverse=True)


def test_the_ground_needs_the_standard_library_only() -> None:
    ground = [path for path in FILES if path.parent == ROOT and folder_of(name_of(path)) == ""]
    outside = {
        (path.name, name.partition(".")[0])
        for path in ground
        for _, name in imports_of(path)
        if name.partition(".")[0] not in sys.stdlib_module_names | {"hvdkit"}
    }
    assert outside == set()


def test_the_agent_stands_alone() -> None:
    """It is started on other hosts by path, and must start there in milliseconds: of hvdkit it loads 4 files more."""
    ground = [ROOT / name for name in ("handshake.py", "ranges.py", "visible_gpus.py", "gpu_vendors.py")]
    for path in [*ground, *sorted((ROOT / "launch" / "agent").glob("*.py"))]:
        for line, name in imports_of(path):
            inside = name.startswith(("hvdkit.launch.agent.", *(f"hvdkit.{each.stem}." for each in ground)))
            assert inside or name.partition(".")[0] in sys.stdlib_module_names, f"{path}:{line} imports {name}"


def test_no_file_is_over_400_lines() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: length for name, length in lengths.items() if length > 400}


def test_a_class_of_launch_shares_its_name_with_no_other_class() -> None:
    files: dict[str, list[Path]] = {}
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in ("launch", "tools"):
            for node in tree_of(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files.setdefault(node.name, []).append(path)
    shared = {
        name for name, paths in files.items() if len(paths) > 1 and any(ROOT / "launch" in p.parents for p in paths)
    }
    assert shared <= {"Agent", "Cpu", "Job"}, "give one of them another name"  # these three are doctor's too


def test_methods_say_what_they_do() -> None:
    """A public method has a docstring, or its class inherits, or names in its docstring, who has one for that name."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for tree in map(tree_of, FILES):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)

    def methods(node: ast.ClassDef, *, told: bool) -> set[str]:
        functions = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"]
        return {each.name for each in functions if bool(ast.get_docstring(each)) == told}

    def interfaces(name: str, seen: set[str]) -> set[str]:
        for node in classes.get(name, ()) if name not in seen else ():
            seen |= {name}
            for base in node.bases:
                interfaces(ast.unparse(base).partition("[")[0].rpartition(".")[2], seen)
        return seen

    wrong = set()
    for name, nodes in classes.items():
        for node in nodes if name[0] != "_" else ():
            words = set(re.findall(r"\w+", ast.get_docstring(node) or ""))
            above = [other for each in interfaces(name, set()) | words for other in classes.get(each, ())]
            untold = methods(node, told=False).difference(words, *(methods(other, told=True) for other in above))
            wrong |= {f"{name}.{method}" for method in untold}
    assert not wrong, wrong


def test_no_file_is_named_utils() -> None:
    assert not [name_of(path) for path in FILES if path.stem == "utils"], "name a file for its one idea"


def environment_uses(tree: ast.AST) -> Iterator[tuple[int, bool]]:
    """Line of each use of the process's variables, and whether it may change them."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.name in ("environ", "environb", "getenv", "putenv", "unsetenv") for alias in node.names):
                yield node.lineno, True
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            if node.attr in ("putenv", "unsetenv"):
                yield node.lineno, True
            elif node.attr in ("environ", "environb", "getenv", "getenvb"):
                around = parents[node]
                stored = isinstance(around, ast.Subscript) and not isinstance(around.ctx, ast.Load)
                called = isinstance(around, ast.Attribute) and around.attr in ("update", "setdefault", "pop", "clear")
                yield node.lineno, stored or called or not isinstance(node.ctx, ast.Load)


def test_only_the_readers_touch_the_environment_and_nobody_writes_it() -> None:
    wrong = []
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        for line, changes in environment_uses(tree_of(path)):
            if not name.startswith(MAY_READ_ENVIRONMENT):
                wrong.append(f"{path}:{line} reads the environment; take a mapping or a Config")
            elif changes and name not in MAY_WRITE_ENVIRONMENT:
                wrong.append(f"{path}:{line} may change the environment; pass the variables to the process instead")
    assert not wrong, "\n".join(wrong)


def test_only_what_a_person_types_prints() -> None:
    wrong = [
        f"{path}:{node.lineno} prints; use hvdkit.log"
        for path in FILES
        if not path.relative_to(ROOT).as_posix().startswith(MAY_PRINT)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os\nos.environ.get('A')", [(2, False)]),
        ("import os\nos.environ['A'] = '1'", [(2, True)]),
        ("import os\ndel os.environ['A']", [(2, True)]),
        ("import os\nos.environ.setdefault('A', '1')", [(2, True)]),
        ("import os\nos.environ |= {}", [(2, True)]),
        ("from os import environ", [(1, True)]),
    ],
)
def test_the_check_of_the_environment_sees(code: str, expected: list[tuple[int, bool]]) -> None:
    assert list(environment_uses(ast.parse(code))) == expected
