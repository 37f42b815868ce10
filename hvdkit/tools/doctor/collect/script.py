"""Facts about a training script, from its text: it is not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdkit.gpu_vendors import VARIABLES

#: Modules of which one makes several processes train together.
_DISTRIBUTED = (
    *"hvdkit horovod torch.distributed mpi4py deepspeed accelerate lightning pytorch_lightning ray torchft".split(),
    *"colossalai megatron byteps bagua".split(),
)
#: Calls that start this process's use of its GPU or its MPI: variables that select GPUs have no effect after them.
_STARTS = {"init", "Init", "Init_thread", "init_process_group", "set_device", "list_physical_devices"}
_SAVES = {"save", "save_weights", "save_checkpoint", "save_model", "save_pretrained", "async_save"}
_SAVERS = {"ModelCheckpoint", "BackupAndRestore", "CheckpointManager", "TorchCheckpointer"}
_DISTRIBUTED_NAMES = {"MultiWorkerMirroredStrategy", "DistributedDataParallel", "DeviceMesh"}


@dataclass(frozen=True)
class ScriptFacts:
    """Facts about a training script.

    path: its path.
    problem: why it could not be read; the fields below are then empty. "" if it could be read.
    distributed: the name in it that makes processes train together, "" for none.
    backend_mpi: line that requests torch's backend mpi; 0 for none.
    visible_late: line that sets a variable that selects GPUs too late; 0 for none.
    visible_variable: this variable.
    device_by_rank: line that uses the local rank as the number of a device; 0 for none.
    saves: does it write checkpoints?
    """

    path: str
    problem: str = ""
    distributed: str = ""
    backend_mpi: int = 0
    visible_late: int = 0
    device_by_rank: int = 0
    saves: bool = False
    visible_variable: str = ""


def read_script(path: str) -> ScriptFacts:
    """Read a script's text."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, SyntaxError, ValueError) as error:
        return ScriptFacts(path, problem=str(error))
    except (RecursionError, MemoryError) as error:  # Python's parser raises these too
        return ScriptFacts(path, problem=f"it is nested too deeply: {error}")
    return scan(path, tree)


def scan(path: str, tree: ast.AST) -> ScriptFacts:
    """Search a script's own text; files that it imports are not searched."""
    calls = [(_name(call.func), call) for call in ast.walk(tree) if isinstance(call, ast.Call)]
    started = min((call.lineno for name, call in calls if name in _STARTS), default=0)
    late = sorted((line, name) for line, name in _lines_that_set_visible(tree) if started and line > started)
    return ScriptFacts(
        path,
        distributed=next(_find_distributed(tree, calls), ""),
        backend_mpi=next(
            (call.lineno for name, call in calls if name == "init_process_group" and "mpi" in _texts(call)), 0
        ),
        visible_late=late[0][0] if late else 0,
        visible_variable=late[0][1] if late else "",
        device_by_rank=next(
            (call.lineno for name, call in calls if name in ("set_device", "cuda") and _by_local_rank(call)), 0
        ),
        saves=any(name in _SAVES or name in _SAVERS for name, _ in calls),
    )


def _find_distributed(tree: ast.AST, calls: list[tuple[str, ast.Call]]) -> Iterator[str]:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if any(name == known or name.startswith(f"{known}.") for known in _DISTRIBUTED):
                yield name
    for name, call in calls:
        whole = ast.unparse(call.func)
        if name in _DISTRIBUTED_NAMES or whole.startswith(("torch.distributed.", "jax.distributed.")):
            yield whole


def _lines_that_set_visible(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = [target for target in node.targets if isinstance(target, ast.Subscript)]
            words = set().union(*map(_texts, targets))
        elif isinstance(node, ast.Call) and _name(node.func) in ("putenv", "setdefault", "update"):
            words = _texts(node) | {word.arg for word in node.keywords if word.arg}
        else:
            continue
        yield from ((node.lineno, name) for name in VARIABLES if name in words)


def _by_local_rank(call: ast.Call) -> bool:
    return any("local_rank" in ast.unparse(word).lower() for word in [*call.args, *(k.value for k in call.keywords)])


def _texts(node: ast.AST) -> set[str]:
    return {item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)}


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
