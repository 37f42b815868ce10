"""torch.distributed and DistributedDataParallel become hvdkit's calls; wrappers of the model go."""

from __future__ import annotations

import re

import libcst as cst

from hvdkit.tools.migrate.draft import Draft
from hvdkit.tools.migrate.finding import Edit
from hvdkit.tools.migrate.names import dotted_name
from hvdkit.tools.migrate.script import argument, last

_WRAPPERS = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.DataParallel", "torch.nn.parallel.DataParallel")
_VARIABLES = {
    "RANK": "rank()",
    "LOCAL_RANK": "local_rank()",
    "WORLD_SIZE": "size()",
    "LOCAL_WORLD_SIZE": "local_size()",
    "SLURM_PROCID": "rank()",
    "SLURM_LOCALID": "local_rank()",
    "SLURM_NTASKS": "size()",
    "OMPI_COMM_WORLD_RANK": "rank()",
    "OMPI_COMM_WORLD_LOCAL_RANK": "local_rank()",
    "OMPI_COMM_WORLD_SIZE": "size()",
}
_MEETING = ("MASTER_ADDR", "MASTER_PORT")


def unwrap_models(draft: Draft) -> None:
    """Take DistributedDataParallel and DataParallel away, and `.module` with them."""
    script = draft.script
    wrapped: set[str] = set()
    for call in script.calls(*_WRAPPERS):
        model = argument(call, "module", 0)
        if model is None:
            draft.breaks(call, "the model cannot be seen here.", "the model itself, without the wrapper")
            continue
        statement = script.statement(call)
        assign = script.parent(call)
        targets = []
        if isinstance(assign, cst.Assign) and len(assign.targets) == 1:
            targets = [dotted_name(assign.targets[0].target)]
        wrapped |= {one for one in targets if one}
        group = argument(call, "process_group")
        if group is not None and script.code(group.value) != "None":
            draft.breaks(
                call,
                "trains on some ranks only.",
                f"DistributedOptimizer(..., process_set={draft.hvd}.ProcessSet([...]))",
            )
            continue
        what = "hvdkit wraps the optimizer in place of the model; unused parameters need no flag."
        is_line = isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1
        if targets and targets[0] == script.code(model.value) and is_line:
            draft.change(call, what, draft.delete(statement))
            continue
        start, end = script.span(call)
        inner = script.span(model.value)
        draft.change(call, what, Edit(start, inner[0], ""), Edit(inner[1], end, ""))
    _drop_module(draft, wrapped)


def _drop_module(draft: Draft, wrapped: set[str]) -> None:
    script = draft.script
    names = {name.rpartition(".")[2] for name in wrapped}
    for node in script.all(cst.Attribute):
        if node.attr.value != "module" or not dotted_name(node.value):
            continue
        owner = dotted_name(node.value)
        given = [script.code(one) for one in draft.bindings.given(node.value)]
        if owner in wrapped or any(one in wrapped for one in given) or owner.rpartition(".")[2] in names:
            end = script.span(node.value)[1]
            draft.change(node, "the model itself is what was in `.module`.", Edit(end, script.span(node)[1], ""))
    for call in script.all(cst.Call):
        if last(call) == "no_sync" and isinstance(call.func, cst.Attribute) and not call.args:
            name = draft.need_import("contextlib", call)
            draft.change(
                call,
                "gradients may be reduced in every backward pass: what they add up to is the same.",
                draft.replace(call, f"{name}.nullcontext()"),
            )
            draft.better(
                call,
                "without no_sync() each backward pass of a window reduces gradients.",
                f"{draft.hvd}.DistributedOptimizer(..., backward_passes_per_step=N) reduces them once",
            )


def use_ranks(draft: Draft) -> None:
    """hvd.rank(), local_rank() and size() in place of the launcher's variables and torch.distributed's functions."""
    _replace_samplers(draft)
    _replace_devices(draft)
    _replace_variables(draft)
    _replace_local_rank_argument(draft)
    script = draft.script
    for call in script.calls("torch.nn.SyncBatchNorm.convert_sync_batchnorm"):
        function = draft.replace(call.func, f"{draft.hvd}.SyncBatchNorm.convert_sync_batchnorm")
        if len(call.args) == 1:
            draft.change(call, "hvdkit's, which needs no process group.", function)
        else:
            draft.breaks(call, "on some ranks only.", f"{draft.hvd}.SyncBatchNorm.convert_sync_batchnorm(model)")


def _variable(draft: Draft, node: cst.BaseExpression) -> str:
    """The name of the variable that is read here; "" if none is."""
    script = draft.script
    text: cst.BaseExpression | None = None
    if isinstance(node, cst.Subscript) and script.name(node.value) == "os.environ":
        index = node.slice[0].slice
        text = index.value if isinstance(index, cst.Index) else None
    if isinstance(node, cst.Call) and script.name(node) in ("os.environ.get", "os.getenv") and node.args:
        text = node.args[0].value
    return text.raw_value if isinstance(text, cst.SimpleString) else ""


def _replace_variables(draft: Draft) -> None:
    script = draft.script
    for node in [*script.all(cst.Subscript), *script.all(cst.Call)]:
        name = _variable(draft, node)
        above = script.parent(node)
        if name in _MEETING and isinstance(above, cst.AssignTarget):
            draft.change(node, "the launcher tells the ranks where to meet.", draft.delete(script.statement(node)))
        elif name in _MEETING or (not name and _reads_some_variable(draft, node)):
            draft.breaks(
                node,
                "hvdrun sets none of torchrun's variables.",
                f"{draft.hvd}.rank(), size() and local_rank(); where to meet hvdkit knows by itself",
            )
        elif name not in _VARIABLES:
            continue
        elif isinstance(above, (cst.AssignTarget, cst.Del)):
            draft.breaks(node, "a script's own ranks, beside those of hvdrun.", "leave the line out")
        else:
            value = f"{draft.hvd}.{_VARIABLES[name]}"
            call = script.parent(above) if isinstance(above, cst.Arg) else None
            if isinstance(call, cst.Call) and last(call) == "int" and isinstance(call.func, cst.Name):
                draft.change(node, "hvdkit knows it, whatever the launcher is.", draft.replace(call, value))
            else:
                draft.change(node, "hvdkit knows it, whatever the launcher is.", draft.replace(node, f"str({value})"))
    for comparison in script.all(cst.Comparison):
        left, right = comparison.left, comparison.comparisons[0]
        if not isinstance(left, cst.SimpleString) or left.raw_value not in _VARIABLES:
            continue
        if len(comparison.comparisons) == 1 and script.name(right.comparator) == "os.environ":
            text = f"{'' if isinstance(right.operator, cst.In) else 'not '}{draft.hvd}.is_initialized()"
            draft.change(comparison, "hvdkit knows it, whatever the launcher is.", draft.replace(comparison, text))


def _reads_some_variable(draft: Draft, node: cst.BaseExpression) -> bool:
    """Is a variable read whose name is not written there, in a script that names torchrun's?"""
    names = {one.raw_value for one in draft.script.all(cst.SimpleString)}
    reads = isinstance(node, cst.Subscript) and draft.script.name(node.value) == "os.environ"
    return (
        reads
        and bool(names & {"RANK", "WORLD_SIZE", "LOCAL_RANK"})
        and not isinstance(draft.script.parent(node), (cst.AssignTarget, cst.Del))
    )


def _replace_local_rank_argument(draft: Draft) -> None:
    """`args.local_rank`, which torch.distributed.launch gave and hvdrun does not."""
    script = draft.script
    options = [
        call
        for call in script.all(cst.Call)
        if last(call) == "add_argument"
        and any(re.search(r"['\"]--local[_-]rank['\"]", script.code(a)) for a in call.args)
    ]
    if not options:
        return
    for node in script.all(cst.Attribute):
        above = script.parent(node)
        if node.attr.value == "local_rank" and dotted_name(node.value) and not isinstance(above, cst.AssignTarget):
            if script.name(node) or dotted_name(node.value) == draft.hvd:
                continue
            if isinstance(above, cst.Attribute) or (isinstance(above, cst.Call) and above.func is node):
                continue
            draft.change(node, "hvdrun gives no --local_rank.", draft.replace(node, f"{draft.hvd}.local_rank()"))


def _replace_samplers(draft: Draft) -> None:
    script, hvd = draft.script, draft.hvd
    for call in script.calls("torch.utils.data.DistributedSampler"):
        dataset = argument(call, "dataset", 0)
        if dataset is None or any(arg.star for arg in call.args):
            draft.breaks(call, "its arguments cannot be seen.", f"{hvd}.data.ShardedSampler(dataset)")
            continue
        parts = [script.code(dataset.value)]
        bad = ""
        for at, arg in enumerate(call.args):
            keyword = (
                arg.keyword.value
                if arg.keyword
                else ("dataset", "num_replicas", "rank", "shuffle", "seed", "drop_last")[at]
            )
            value = script.code(arg.value)
            if keyword in ("num_replicas", "rank"):
                if not re.search(r"rank|world|size|replica|None|gpus|n_proc", value, re.IGNORECASE):
                    bad = f"{keyword}={value}"
            elif keyword in ("shuffle", "seed"):
                parts.append(f"{keyword}={value}")
            elif keyword == "drop_last" and value != "False":
                parts.append('uneven="drop"' if value == "True" else f'uneven="drop" if {value} else "pad"')
        if bad:
            draft.breaks(
                call, f"{bad}: not the number of all ranks, as it seems.", f"{hvd}.data.ShardedSampler(dataset)"
            )
        else:
            draft.change(
                call, "hvdkit's sampler.", draft.replace(call, f"{hvd}.data.ShardedSampler({', '.join(parts)})")
            )


def _replace_devices(draft: Draft) -> None:
    script, hvd = draft.script, draft.hvd
    for call in script.all(cst.Call):
        name = script.name(call)
        values = [arg.value for arg in call.args]
        rank = bool(values) and re.search(r"rank|gpu|device_id", script.code(values[-1])) is not None
        if name == "torch.cuda.set_device" and rank:
            draft.change(call, "this rank's GPU.", draft.replace(values[0], f"{hvd}.local_device()"))
        elif name == "torch.device" and rank and (len(values) == 2 or isinstance(values[0], cst.FormattedString)):
            draft.change(call, "this rank's GPU.", draft.replace(call, f"{hvd}.local_device()"))
        elif last(call) in ("to", "cuda") and isinstance(call.func, cst.Attribute) and rank:
            if not isinstance(values[0], cst.FormattedString) and not re.fullmatch(
                r"(args\.)?(local_)?rank|gpu|gpu_id", script.code(values[0])
            ):
                continue
            draft.change(call, "this rank's GPU.", draft.replace(values[0], f"{hvd}.local_device()"))
    for one in script.all(cst.FormattedString):
        above = script.parent(one)
        if isinstance(above, cst.Assign) and re.match(r"""f['"]cuda:\{""", script.code(one)):
            draft.change(one, "this rank's GPU.", draft.replace(one, f"{hvd}.local_device()"))
