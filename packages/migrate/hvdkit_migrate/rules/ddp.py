"""torch.distributed and DistributedDataParallel become calls of hvdkit; wrappers of the model are removed."""

from __future__ import annotations

import re

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.findings import Edit
from hvdkit_migrate.names import dotted_name
from hvdkit_migrate.script import argument, last

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
    """Remove DistributedDataParallel and DataParallel, with their `.module`."""
    script = draft.script
    wrapped: set[str] = set()
    for call in script.calls(*_WRAPPERS):
        model = argument(call, "module", 0)
        if model is None:
            draft.breaks(call, "the wrapped model is not visible here.", "the model itself, without the wrapper")
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
                "trains on a subgroup of the ranks.",
                f"DistributedOptimizer(..., process_set={draft.hvd}.ProcessSet([...]))",
            )
            continue
        what = "hvdkit wraps the optimizer instead of the model; unused parameters need no flag."
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
            draft.change(node, "the unwrapped model replaces `.module`.", Edit(end, script.span(node)[1], ""))
    for call in script.all(cst.Call):
        if last(call) == "no_sync" and isinstance(call.func, cst.Attribute) and not call.args:
            name = draft.need_import("contextlib", call)
            draft.change(
                call,
                "gradients are reduced in every backward pass; their sum is the same.",
                draft.replace(call, f"{name}.nullcontext()"),
            )
            draft.better(
                call,
                "without no_sync() gradients are reduced in every backward pass of an accumulation window.",
                f"{draft.hvd}.DistributedOptimizer(..., backward_passes_per_step=N) reduces them once",
            )


def use_ranks(draft: Draft) -> None:
    """Use hvd.rank(), local_rank() and size() instead of the launcher's variables and torch.distributed's functions."""
    _replace_samplers(draft)
    _replace_devices(draft)
    _replace_variables(draft)
    _replace_local_rank_argument(draft)
    script = draft.script
    for call in script.calls("torch.nn.SyncBatchNorm.convert_sync_batchnorm"):
        function = draft.replace(call.func, f"{draft.hvd}.SyncBatchNorm.convert_sync_batchnorm")
        if len(call.args) == 1:
            draft.change(call, "hvdkit's version needs no process group.", function)
        else:
            draft.breaks(
                call, "on a subgroup of the ranks.", f"{draft.hvd}.SyncBatchNorm.convert_sync_batchnorm(model)"
            )


def _variable(draft: Draft, node: cst.BaseExpression) -> str:
    """Return the name of the variable that is read here; "" for other code."""
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
            draft.change(node, "hvdkit needs no rendezvous address.", draft.delete(script.statement(node)))
        elif name in _MEETING or (not name and _reads_some_variable(draft, node)):
            draft.breaks(
                node,
                "hvdkit does not read torchrun's variables.",
                f"{draft.hvd}.rank(), size() and local_rank(); hvdkit needs no rendezvous address",
            )
        elif name not in _VARIABLES:
            continue
        elif isinstance(above, (cst.AssignTarget, cst.Del)):
            draft.breaks(node, "sets ranks that conflict with those of hvdrun.", "remove the line")
        else:
            value = f"{draft.hvd}.{_VARIABLES[name]}"
            call = script.parent(above) if isinstance(above, cst.Arg) else None
            if isinstance(call, cst.Call) and last(call) == "int" and isinstance(call.func, cst.Name):
                draft.change(node, "hvdkit provides the value under every launcher.", draft.replace(call, value))
            else:
                draft.change(
                    node, "hvdkit provides the value under every launcher.", draft.replace(node, f"str({value})")
                )
    for comparison in script.all(cst.Comparison):
        left, right = comparison.left, comparison.comparisons[0]
        if not isinstance(left, cst.SimpleString) or left.raw_value not in _VARIABLES:
            continue
        if len(comparison.comparisons) == 1 and script.name(right.comparator) == "os.environ":
            text = f"{'' if isinstance(right.operator, cst.In) else 'not '}{draft.hvd}.is_initialized()"
            draft.change(comparison, "hvdkit provides the value under every launcher.", draft.replace(comparison, text))


def _reads_some_variable(draft: Draft, node: cst.BaseExpression) -> bool:
    """Does it read a variable whose name is not a constant there, in a script that names torchrun's variables?"""
    names = {one.raw_value for one in draft.script.all(cst.SimpleString)}
    reads = isinstance(node, cst.Subscript) and draft.script.name(node.value) == "os.environ"
    return (
        reads
        and bool(names & {"RANK", "WORLD_SIZE", "LOCAL_RANK"})
        and not isinstance(draft.script.parent(node), (cst.AssignTarget, cst.Del))
    )


def _replace_local_rank_argument(draft: Draft) -> None:
    """Replace `args.local_rank`, an option that torch.distributed.launch sets and hvdrun does not."""
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
            draft.change(node, "hvdrun passes no --local_rank.", draft.replace(node, f"{draft.hvd}.local_rank()"))


def _replace_samplers(draft: Draft) -> None:
    script, hvd = draft.script, draft.hvd
    for call in script.calls("torch.utils.data.DistributedSampler"):
        dataset = argument(call, "dataset", 0)
        if dataset is None or any(arg.star for arg in call.args):
            draft.breaks(call, "its arguments are not visible.", f"{hvd}.data.ShardedSampler(dataset)")
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
                call,
                f"{bad} does not look like the rank or the number of ranks.",
                f"{hvd}.data.ShardedSampler(dataset)",
            )
        else:
            draft.change(
                call,
                "hvdkit's sampler replaces it.",
                draft.replace(call, f"{hvd}.data.ShardedSampler({', '.join(parts)})"),
            )


def _replace_devices(draft: Draft) -> None:
    script, hvd = draft.script, draft.hvd
    for call in script.all(cst.Call):
        name = script.name(call)
        values = [arg.value for arg in call.args]
        rank = bool(values) and re.search(r"rank|gpu|device_id", script.code(values[-1])) is not None
        if name == "torch.cuda.set_device" and rank:
            draft.change(call, "uses this rank's GPU.", draft.replace(values[0], f"{hvd}.local_device()"))
        elif name == "torch.device" and rank and (len(values) == 2 or isinstance(values[0], cst.FormattedString)):
            draft.change(call, "uses this rank's GPU.", draft.replace(call, f"{hvd}.local_device()"))
        elif last(call) in ("to", "cuda") and isinstance(call.func, cst.Attribute) and rank:
            if not isinstance(values[0], cst.FormattedString) and not re.fullmatch(
                r"(args\.)?(local_)?rank|gpu|gpu_id", script.code(values[0])
            ):
                continue
            draft.change(call, "uses this rank's GPU.", draft.replace(values[0], f"{hvd}.local_device()"))
    for one in script.all(cst.FormattedString):
        above = script.parent(one)
        if isinstance(above, cst.Assign) and re.match(r"""f['"]cuda:\{""", script.code(one)):
            draft.change(one, "uses this rank's GPU.", draft.replace(one, f"{hvd}.local_device()"))


# Collectives --------------------------------------------------------------------------------------------------------

_OPS = {"SUM": "Sum", "AVG": "Average", "MAX": "Max", "MIN": "Min", "PRODUCT": "Product"}
_PLAIN = {
    "get_rank": "rank()",
    "get_world_size": "size()",
    "is_initialized": "is_initialized()",
    "destroy_process_group": "shutdown()",
    "barrier": "barrier()",
    "get_node_local_rank": "local_rank()",
}
_HARMLESS = ("is_available", "is_nccl_available", "is_gloo_available", "is_torchelastic_launched", "ReduceOp")
_PREFIX = "torch.distributed."


def drop_init(draft: Draft) -> None:
    """Remove init_process_group(): hvd.init() connects the ranks."""
    for call in draft.script.calls(_PREFIX + "init_process_group"):
        draft.change(call, "hvd.init() replaces it.", draft.delete(draft.script.statement(call)))


def replace_collectives(draft: Draft) -> None:
    """Replace each call of torch.distributed for which hvdkit has an equivalent, and report the others."""
    script, hvd = draft.script, draft.hvd
    for call in script.all(cst.Call):
        name = script.name(call)
        own = name.removeprefix(_PREFIX)
        if not name.startswith(_PREFIX) or "." in own or own in _HARMLESS:
            continue
        group = argument(call, "group")
        if group is not None and script.code(group.value) not in ("None", "dist.group.WORLD"):
            draft.breaks(call, "a collective of a subgroup.", f"process_set={hvd}.ProcessSet([...]) of an {hvd} call")
        elif own == "init_process_group":
            continue
        elif own in _PLAIN and (own in ("barrier", "destroy_process_group") or not call.args):
            draft.change(call, f"hvdkit's {_PLAIN[own]}.", draft.replace(call, f"{hvd}.{_PLAIN[own]}"))
        elif not _replace(draft, call, own):
            draft.breaks(
                call,
                f"hvdkit has no single call that replaces this use of torch.distributed.{own}.",
                f"{hvd}.allreduce, allgather, broadcast, alltoall or reducescatter, which return their results; "
                f"{hvd}.allgather_object for objects",
            )


def _replace(draft: Draft, call: cst.Call, own: str) -> bool:
    """Replace a collective; returns False if that may be wrong."""
    script, hvd = draft.script, draft.hvd
    parts = [script.code(arg.value) for arg in call.args]
    by_hand = any(arg.star for arg in call.args) or (argument(call, "async_op") is not None)
    if by_hand or not isinstance(script.parent(call), cst.Expr) or not call.args:
        return False
    what = f"hvdkit's collective replaces {own}."
    if own in ("all_reduce", "reduce"):
        tensor = argument(call, "tensor", 0)
        op = argument(call, "op", 1 if own == "all_reduce" else 2)
        kind = "SUM" if op is None else last(op.value) if dotted_name(op.value) else ""
        if tensor is None or kind not in _OPS:
            return False
        text = f"{hvd}.allreduce_({script.code(tensor.value)}, op={hvd}.{_OPS[kind]})"
    elif own == "broadcast":
        tensor, root = argument(call, "tensor", 0), argument(call, "src", 1)
        if tensor is None or root is None:
            return False
        text = f"{hvd}.broadcast_({script.code(tensor.value)}, root_rank={script.code(root.value)})"
    elif own == "broadcast_object_list" and dotted_name(call.args[0].value):
        root = argument(call, "src", 1)
        text = f"{parts[0]}[:] = {hvd}.broadcast_object({parts[0]}, root_rank={script.code(root.value) if root else 0})"
    elif own == "all_gather_object" and len(parts) == 2 and dotted_name(call.args[0].value):
        text = f"{parts[0]}[:] = {hvd}.allgather_object({parts[1]})"
    elif (
        own == "all_gather" and len(parts) == 2 and dotted_name(call.args[0].value) and dotted_name(call.args[1].value)
    ):
        text = f"{parts[0]}[:] = {hvd}.allgather({parts[1]}.unsqueeze(0)).unbind(0)"
    else:
        return False
    draft.change(call, what, draft.replace(call, text))
    return True
