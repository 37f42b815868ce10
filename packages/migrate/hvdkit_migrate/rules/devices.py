"""Gives each rank a GPU of its own."""

from __future__ import annotations

import re

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.script import last

_FIRST = ("'cuda:0'", '"cuda:0"')
_ANY = ("'cuda'", '"cuda"', *_FIRST)
_CPU = ("'cpu'", '"cpu"')


def choose_devices(draft: Draft) -> None:
    """Write hvd.local_device() where the script chooses the GPU; `.cuda()` and "cuda" then mean it too."""
    script, hvd = draft.script, draft.hvd
    for call in script.calls("torch.device"):
        if len(call.args) == 1 and _is_usual(draft, call.args[0].value):
            draft.change(call, "each rank uses its own GPU, or the CPU.", draft.replace(call, f"{hvd}.local_device()"))
    for one in script.all(cst.SimpleString):
        number = re.fullmatch(r"""['"]cuda:(\d+)['"]""", one.value)
        if number and not _in_device(draft, one):
            _mend_string(draft, one, number[1])
    for call in script.all(cst.Call):
        moves = last(call) == "cuda" and isinstance(call.func, cst.Attribute) and len(call.args) == 1
        sets = script.name(call) == "torch.cuda.set_device" and len(call.args) == 1
        if (moves and script.code(call.args[0]) == "0") or (sets and isinstance(call.args[0].value, cst.Integer)):
            edit = draft.replace(call.args[0], f"{hvd}.local_device()")
            draft.change(call, "each rank uses its own GPU.", edit)
    for target in script.all(cst.AssignTarget):
        if "CUDA_VISIBLE_DEVICES" in script.code(target):
            draft.breaks(
                target,
                "all ranks would share these GPUs.",
                f"remove the line: {hvd}.local_device() assigns the visible GPUs to ranks",
            )


def mentions_cuda(draft: Draft) -> bool:
    """Does the script use a GPU in a way that requires the current device to be this rank's?"""
    script = draft.script
    strings = any(
        one.value in _ANY
        and not _in_device(draft, one)
        and not isinstance(script.parent(one), (cst.Comparison, cst.ComparisonTarget))
        for one in script.all(cst.SimpleString)
    )
    methods = any(last(call) == "cuda" and not call.args for call in script.all(cst.Call))
    return strings or methods


def _in_device(draft: Draft, node: cst.CSTNode) -> bool:
    return any(
        isinstance(above, cst.Call)
        and _is_device(draft, above)
        and len(above.args) == 1
        and _is_usual(draft, above.args[0].value)
        for above in draft.script.above(node)
    )


def _is_device(draft: Draft, call: cst.Call) -> bool:
    return draft.script.name(call) == "torch.device"


def _is_usual(draft: Draft, value: cst.BaseExpression) -> bool:
    """Does it choose "cuda" if that is available, else "cpu"?"""
    script = draft.script
    if isinstance(value, cst.IfExp):
        asked = isinstance(value.test, cst.Call) and script.name(value.test) == "torch.cuda.is_available"
        return asked and script.code(value.body) in _ANY and script.code(value.orelse) in _CPU
    return script.code(value) in _FIRST


def _mend_string(draft: Draft, one: cst.SimpleString, number: str) -> None:
    if number == "0":
        draft.change(one, '"cuda" then means the GPU of this rank.', draft.replace(one, one.quote + "cuda" + one.quote))
    else:
        draft.breaks(
            one,
            f"all ranks would use GPU {number}.",
            f"{draft.hvd}.local_device(); with two GPUs per rank, 2 * {draft.hvd}.local_rank() + 1",
        )
