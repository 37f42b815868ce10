"""torch.distributed's functions as hvdkit's."""

from __future__ import annotations

import libcst as cst

from hvdkit.tools.migrate.draft import Draft
from hvdkit.tools.migrate.names import dotted_name
from hvdkit.tools.migrate.script import argument, last

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
    """Leave out init_process_group(): hvd.init() joins the ranks."""
    for call in draft.script.calls(_PREFIX + "init_process_group"):
        draft.change(call, "hvd.init() joins the ranks.", draft.delete(draft.script.statement(call)))


def replace_collectives(draft: Draft) -> None:
    """Replace each call of torch.distributed that hvdkit has one for, and report the others."""
    script, hvd = draft.script, draft.hvd
    for call in script.all(cst.Call):
        name = script.name(call)
        own = name.removeprefix(_PREFIX)
        if not name.startswith(_PREFIX) or "." in own or own in _HARMLESS:
            continue
        group = argument(call, "group")
        if group is not None and script.code(group.value) not in ("None", "dist.group.WORLD"):
            draft.breaks(call, "among some ranks only.", f"process_set={hvd}.ProcessSet([...]) of an {hvd} call")
        elif own == "init_process_group":
            continue
        elif own in _PLAIN and (own in ("barrier", "destroy_process_group") or not call.args):
            draft.change(call, f"hvdkit's {_PLAIN[own]}.", draft.replace(call, f"{hvd}.{_PLAIN[own]}"))
        elif not _replace(draft, call, own):
            draft.breaks(
                call,
                f"torch.distributed's {own} as it is used here has no single call of hvdkit in its place.",
                f"{hvd}.allreduce, allgather, broadcast, alltoall or reducescatter, which return their results; "
                f"{hvd}.allgather_object for objects",
            )


def _replace(draft: Draft, call: cst.Call, own: str) -> bool:
    """Replace a collective; False if it cannot be done for certain."""
    script, hvd = draft.script, draft.hvd
    parts = [script.code(arg.value) for arg in call.args]
    by_hand = any(arg.star for arg in call.args) or (argument(call, "async_op") is not None)
    if by_hand or not isinstance(script.parent(call), cst.Expr) or not call.args:
        return False
    what = f"hvdkit's, among all ranks, in place of {own}."
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
