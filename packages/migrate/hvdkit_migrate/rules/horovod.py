"""Renames Horovod's modules to hvdkit's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.findings import Edit
from hvdkit_migrate.names import dotted_name
from hvdkit_migrate.script import last, matches

_GONE = {
    "horovod.spark.lightning": "call Lightning's Trainer in a function, and start it by hvdkit_spark.run()",
    "horovod.spark.tensorflow": "tf.data on each rank",
    "horovod.run": "start the script with hvdrun, and call the function on each rank",
    "horovod.runner": "start the script with hvdrun, and call the function on each rank",
    "horovod.mxnet": "MXNet is retired; port the model to PyTorch",
    "horovod._keras": "the same names from hvdkit.keras",
}
#: Names of Horovod's that only TensorFlow 1 needs.
_SESSIONS = ("BroadcastGlobalVariablesHook", "broadcast_global_variables")
#: Modules of Horovod's -> the packages that have them.
_PACKAGES = {"horovod.ray": "hvdkit_ray", "horovod.spark": "hvdkit_spark"}
#: Modules of hvdkit under Horovod's paths -> the names in `__all__` of each; empty if a module has no such list. They
#: are data, because hvdkit need not be installed where scripts are migrated.
_MODULES: dict[str, list[str]] = json.loads(files("hvdkit_migrate").joinpath("hvdkit_names.json").read_text())


def rename_imports(draft: Draft) -> None:
    """Replace horovod by hvdkit in imports and dotted names; report names that hvdkit does not have."""
    script = draft.script
    for one in script.all(cst.Import):
        edits = []
        for alias in one.names:
            edits += _rename(draft, one, alias.name, dotted_name(alias.name), [])
        if edits:
            draft.change(one, "hvdkit has Horovod's modules under the same paths.", *edits)
    for each in script.all(cst.ImportFrom):
        module = dotted_name(each.module)
        if module.partition(".")[0] != "horovod" or each.module is None or each.relative:
            continue
        names = [] if isinstance(each.names, cst.ImportStar) else [dotted_name(alias.name) for alias in each.names]
        edits = _rename(draft, each, each.module, module, names)
        if edits:
            draft.change(each, "hvdkit has Horovod's modules under the same paths.", *edits)
    _rename_uses(draft)
    _check_names(draft)


def _rename(draft: Draft, node: cst.CSTNode, name: cst.CSTNode, module: str, names: list[str]) -> list[Edit]:
    """Return the edits for a module's name; if hvdkit lacks the module or name, report that and return none."""
    if module.partition(".")[0] != "horovod":
        return []
    asked = [module, *(f"{module}.{one}" for one in names)] if module == "horovod" and names else [module]
    for path in asked:
        gone = next((one for one in _GONE if matches(path + ".", [one + "."])), None)
        if module == "horovod" and path in _PACKAGES:
            write = f"import {_PACKAGES[path]} as {path.rpartition('.')[2]}"
            draft.breaks(node, f"{path} is the package {_PACKAGES[path]}.", write)
            return []
        target = _target(path)
        if gone or (path != "horovod" and target not in _MODULES):
            write = _GONE.get(gone or "", "hvdkit's docs/comparisons/horovod.md lists what there is")
            draft.breaks(node, f"hvdkit has no {path}.", write)
            return []
    target = _target(module)
    known = _MODULES.get(target)
    for one in names:
        if module != "horovod" and known and one not in known and f"{target}.{one}" not in _MODULES:
            draft.breaks(node, f"{target} has no {one}.", _instead(draft, one))
    start = draft.script.span(name)[0]
    old = _renamed(module)
    return [Edit(start, start + len(old), _target(old))]


def _renamed(module: str) -> str:
    """Return the prefix of a module's name that is different in hvdkit."""
    package = ".".join(module.split(".")[:2])
    return package if package in _PACKAGES else "horovod"


def _target(module: str) -> str:
    """Return the name in hvdkit of a module of Horovod's."""
    old = _renamed(module)
    return _PACKAGES.get(old, "hvdkit") + module[len(old) :]


def _instead(draft: Draft, name: str) -> str:
    if name in _SESSIONS:
        hvd = draft.hvd
        return (
            f"{hvd}.broadcast_variables(variables, root_rank=0), or {hvd}.callbacks.BroadcastGlobalVariablesCallback(0)"
            "; in graphs for tf.compat.v1.Session leave it as it is"
        )
    if name == "run":
        return "hvdrun, and call the function on each rank"
    return "hvdkit's docs/comparisons/horovod.md lists what there is"


def _rename_uses(draft: Draft) -> None:
    """Rename uses such as `horovod.torch.rank()` after a plain `import horovod.torch`."""
    script = draft.script
    for name in script.all(cst.Name):
        above = script.parent(name)
        if (
            script.name(name) != "horovod"
            or name.value != "horovod"
            or any(isinstance(one, (cst.Import, cst.ImportFrom)) for one in script.above(name))
        ):
            continue
        if not isinstance(above, cst.Attribute) or above.value is not name:
            continue
        if above.attr.value == "run":
            path = f"horovod.{above.attr.value}"
            draft.breaks(above, f"hvdkit has no {path}.", _GONE[path])
        elif f"horovod.{above.attr.value}" in _PACKAGES:
            package = _PACKAGES[f"horovod.{above.attr.value}"]
            draft.change(above, "follows the renamed import.", draft.replace(above, package))
        else:
            draft.change(name, "follows the renamed import.", draft.replace(name, "hvdkit"))


def _check_names(draft: Draft) -> None:
    """Report names of Horovod's that hvdkit's module does not have."""
    script = draft.script
    for node, name in _uses(draft):
        module, _, own = name.rpartition(".")
        target = _target(module)
        known = _MODULES.get(target)
        if own in _SESSIONS:
            draft.breaks(node, f"{own} is for TensorFlow 1.", _instead(draft, own))
        elif known and own not in known and f"{target}.{own}" not in _MODULES and not own.startswith("_"):
            draft.breaks(node, f"{target} has no {own}.", _instead(draft, own))
    for call in script.all(cst.Call):
        if isinstance(call.func, cst.Attribute) and last(call) == "synchronize" and not call.args:
            made = [script.name(one) for one in draft.bindings.origins(call.func.value)]
            if any(name.endswith("DistributedOptimizer") for name in made):
                draft.better(
                    call,
                    "gradients are reduced when backward() returns.",
                    "remove synchronize() and skip_synchronize(), which are optional",
                )
    for call in script.calls("torch.cuda.set_device"):
        if call.args and script.code(call.args[0]).endswith("local_rank()"):
            draft.better(
                call,
                "fails where the launcher makes one GPU visible to each rank.",
                f"torch.cuda.set_device({draft.hvd}.local_device())",
            )
    for decorator in script.all(cst.Decorator):
        if script.name(decorator.decorator).endswith("elastic.run"):
            draft.better(
                decorator,
                "the number of ranks changes only in a job that hvdrun started with --elastic.",
                "hvdrun --elastic -np N --min-np N python train.py",
            )


def _uses(draft: Draft) -> Iterator[tuple[cst.Attribute, str]]:
    for node in draft.script.all(cst.Attribute):
        name = draft.script.name(node)
        owner = (
            draft.script.name(node.value) in ("horovod.torch", "horovod.keras") or dotted_name(node.value) == draft.hvd
        )
        imported = any(isinstance(one, (cst.Import, cst.ImportFrom)) for one in draft.script.above(node))
        if name.startswith("horovod.") and owner and not imported:
            yield node, name
