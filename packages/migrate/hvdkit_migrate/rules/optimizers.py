"""Wraps optimizers, so that they step on the gradients of all ranks, and makes all ranks start equal."""

from __future__ import annotations

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.findings import Edit
from hvdkit_migrate.names import dotted_name
from hvdkit_migrate.script import argument, last
from hvdkit_migrate.training import Optimizer, Training

_SCALED = {
    "torch.optim.lr_scheduler.OneCycleLR": [("max_lr", 1)],
    "torch.optim.lr_scheduler.CyclicLR": [("base_lr", 1), ("max_lr", 2)],
}


def wrap_optimizers(draft: Draft, training: Training, *, scale: bool) -> None:
    """Wrap each optimizer at its constructor. scale: multiply learning rates by the number of ranks."""
    done: set[tuple[cst.CSTNode, str]] = set()
    broadcast: set[tuple[cst.CSTNode | None, str]] = set()
    for optimizer in training.optimizers:
        if scale:
            scale_rate(draft, optimizer)
        statement = draft.script.statement(optimizer.call)
        anchor = _around_branches(draft, optimizer, statement)
        if optimizer.target and (anchor, optimizer.target) in done:
            _scale_line(draft, optimizer, statement)
            continue
        done.add((anchor, optimizer.target))
        if optimizer.target and draft.script.is_in_block(statement):
            _wrap_named(draft, training, optimizer, statement, broadcast)
        else:
            _wrap_in_place(draft, optimizer, statement)
    if scale:
        _scale_schedulers(draft)
        _scale_by_hand(draft)
    if training.optimizers and not training.backwards:
        draft.breaks(
            training.optimizers[0].call,
            "no backward pass in this file: whether its data are sharded is not visible.",
            "run hvdkit migrate on the file with the training loop; then the comment `# hvdkit: ok` here",
        )
    shuffled = [one.call for one in training.loaders if one.use == "unknown" or one.sharded]
    if not training.optimizers and not training.backwards and shuffled:
        draft.breaks(
            shuffled[0],
            "no training in this file: whether the optimizer is wrapped is not visible.",
            "run hvdkit migrate on the training file; then the comment `# hvdkit: ok` here",
        )
    if training.backwards and not training.optimizers:
        draft.breaks(
            training.backwards[0],
            "no optimizer in this file: gradients may not be reduced.",
            f"optimizer = {draft.hvd}.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()) where "
            f"it is constructed, then {draft.hvd}.broadcast_parameters(model.state_dict(), root_rank=0); then the "
            "comment `# hvdkit: ok` here",
        )


def scale_rate(draft: Draft, optimizer: Optimizer) -> None:
    """Multiply an optimizer's learning rate by the number of ranks: its batch is that many times larger."""
    rate = argument(optimizer.call, "lr", 1 if optimizer.from_torch else None)
    if _needs_line(optimizer, rate):
        if not optimizer.target:
            draft.breaks(
                optimizer.call,
                "its learning rate cannot be scaled here, because the optimizer has no name.",
                f"{draft.hvd}.learning_rate.scale_learning_rate(optimizer, {draft.hvd}.size()) before schedulers",
            )
        return
    assert rate is not None
    draft.change(
        optimizer.call,
        "the learning rate is scaled linearly with the global batch size.",
        *draft.times(rate.value, f"{draft.hvd}.size()"),
    )


def _needs_line(optimizer: Optimizer, rate: cst.Arg | None) -> bool:
    return rate is None or optimizer.own_rates


def _wrap_named(
    draft: Draft,
    training: Training,
    optimizer: Optimizer,
    statement: cst.CSTNode,
    broadcast: set[tuple[cst.CSTNode | None, str]],
) -> None:
    hvd, name, script = draft.hvd, optimizer.target, draft.script
    _scale_line(draft, optimizer, statement)
    anchor = _last_before_training(draft, training, _around_branches(draft, optimizer, statement), optimizer)
    draft.change(
        statement,
        "the optimizer steps on the gradients of all ranks.",
        draft.after(anchor, f"{name} = {hvd}.DistributedOptimizer({name}{_named(optimizer)})"),
    )
    lines = []
    function = script.function(statement)
    for model in _roots(draft, optimizer):
        if (function, model) not in broadcast:
            broadcast.add((function, model))
            lines += [
                f"{hvd}.broadcast_parameters({one}.state_dict(), root_rank=0)"
                for one in (model, *_copies(draft, model, anchor))
            ]
    if not optimizer.models:
        parameters = f'[p for group in {name}.param_groups for p in group["params"]]'
        lines.append(f"{hvd}.broadcast_parameters({parameters}, root_rank=0)")
    lines.append(f"{hvd}.broadcast_optimizer_state({name}, root_rank=0)")
    draft.change(anchor, "broadcasts the state of rank 0 before training.", draft.after(anchor, *lines))


def _scale_line(draft: Draft, optimizer: Optimizer, statement: cst.CSTNode) -> None:
    """Scale the learning rates of an existing optimizer, if its constructor cannot be changed to do so."""
    rate = argument(optimizer.call, "lr", 1 if optimizer.from_torch else None)
    if _needs_line(optimizer, rate) and not draft.is_distributed:
        line = f"{draft.hvd}.learning_rate.scale_learning_rate({optimizer.target}, {draft.hvd}.size())"
        draft.change(
            statement,
            "the learning rates are scaled linearly with the global batch size.",
            draft.after(statement, line),
        )


def _named(optimizer: Optimizer) -> str:
    only = optimizer.models[0] if len(optimizer.models) == 1 else ""
    return f", named_parameters={only}.named_parameters()" if only else ""


def _wrap_in_place(draft: Draft, optimizer: Optimizer, statement: cst.CSTNode) -> None:
    """Wrap an optimizer that is returned, or is in a list."""
    hvd = draft.hvd
    edits = list(draft.around(optimizer.call, f"{hvd}.DistributedOptimizer(", f"{_named(optimizer)})"))
    if optimizer.models and draft.script.is_in_block(statement):
        roots = _roots(draft, optimizer)
        lines = [f"{hvd}.broadcast_parameters({one}.state_dict(), root_rank=0)" for one in roots]
        edits.append(draft.before(statement, *lines))
    else:
        draft.breaks(
            optimizer.call,
            "the model is not visible here: ranks may start with different weights.",
            f"{hvd}.broadcast_parameters(model.state_dict(), root_rank=0) before training",
        )
    draft.change(
        optimizer.call, "the optimizer steps on the gradients of all ranks; the initial weights are broadcast.", *edits
    )


def _roots(draft: Draft, optimizer: Optimizer) -> list[str]:
    """List the whole models whose parameters the optimizer has."""
    roots = []
    for model in optimizer.models:
        first, _, rest = model.partition(".")
        root = f"{first}.{rest.partition('.')[0]}" if first == "self" and rest else first
        used = any(
            draft.script.code(call.func)
            in (root, *(f"{root}.{each}" for each in ("train", "eval", "to", "state_dict")))
            for call in draft.script.all(cst.Call)
        )
        roots.append(root if used else model)
    return list(dict.fromkeys(roots))


def _copies(draft: Draft, model: str, anchor: cst.CSTNode) -> list[str]:
    """List models that got the weights of another model before those were broadcast."""
    script, copies = draft.script, []
    end = script.span(anchor)[1]
    for call in script.all(cst.Call):
        if script.span(call)[0] > end or script.function(call) is not script.function(anchor) or not call.args:
            continue
        given = script.code(call.args[0].value)
        if (
            last(call) == "load_state_dict"
            and given == f"{model}.state_dict()"
            and isinstance(call.func, cst.Attribute)
        ):
            copies.append(script.code(call.func.value))
        if last(call) in ("deepcopy", "AveragedModel", "ModelEma", "ModelEmaV2") and given == model:
            copies += [
                name for (_, name), bounds in draft.bindings.assigned.items() for one in bounds if one.value is call
            ]
    return [one for one in dict.fromkeys(copies) if one != model]


def _around_branches(draft: Draft, optimizer: Optimizer, statement: cst.CSTNode) -> cst.CSTNode:
    """Find the statement after which the optimizer exists: the whole `if` if each branch makes one, or ends."""
    found = statement
    for above in draft.script.above(statement):
        if not isinstance(above, cst.If) or not draft.script.is_in_block(above):
            if isinstance(above, (cst.IndentedBlock, cst.Else, cst.If)):
                continue
            break
        if not all(_settles(draft, branch, optimizer.target) for branch in _branches(above)):
            break
        found = above
    return found


def _branches(statement: cst.If) -> list[cst.BaseSuite | None]:
    if isinstance(statement.orelse, cst.If):
        return [statement.body, *_branches(statement.orelse)]
    return [statement.body, statement.orelse.body if statement.orelse is not None else None]


def _settles(draft: Draft, branch: cst.BaseSuite | None, target: str) -> bool:
    if branch is None:
        return False
    made = any(
        dotted_name(one.target) == target and not isinstance(assign.value, cst.Name)
        for assign in draft.script.inside(branch, cst.Assign)
        for one in assign.targets
    )
    ends = bool(draft.script.inside(branch, cst.Raise)) or bool(draft.script.inside(branch, cst.Return))
    return made or ends or any(last(call) == "exit" for call in draft.script.inside(branch, cst.Call))


def _last_before_training(
    draft: Draft, training: Training, statement: cst.CSTNode, optimizer: Optimizer
) -> cst.CSTNode:
    """Find the last statement before training that moves or loads what the optimizer trains, or else `statement`."""
    script, found = draft.script, statement
    siblings = script.siblings(statement)
    for later in siblings[siblings.index(statement) + 1 :]:
        if isinstance(later, (cst.For, cst.While, cst.FunctionDef, cst.ClassDef)) or training.trains(later):
            break
        if script.inside(later, cst.Return):
            break
        for call in script.inside(later, cst.Call):
            owner = script.code(call.func.value) if isinstance(call.func, cst.Attribute) else ""
            mine = owner == optimizer.target or owner.partition(".")[0] in [
                m.partition(".")[0] for m in optimizer.models
            ]
            if mine and last(call) in ("to", "cuda", "cpu", "load_state_dict", "apply", "half", "double", "float"):
                found = later
    return found


def _scale_schedulers(draft: Draft) -> None:
    for name, arguments in _SCALED.items():
        for call in draft.script.calls(name):
            for keyword, position in arguments:
                rate = argument(call, keyword, position)
                if rate is not None and not isinstance(rate.value, (cst.List, cst.ListComp)):
                    edits = draft.times(rate.value, f"{draft.hvd}.size()")
                    draft.change(call, f"{keyword} is a learning rate and is scaled too.", *edits)
                elif rate is not None:
                    draft.breaks(call, f"{keyword} sets unscaled learning rates.", f"each * {draft.hvd}.size()")


def _scale_by_hand(draft: Draft) -> None:
    """Scale learning rates that the script itself writes into param_groups."""
    script = draft.script
    for assign in script.all(cst.Assign):
        target = assign.targets[0].target
        if not isinstance(target, cst.Subscript) or not script.code(target).endswith(("['lr']", '["lr"]')):
            continue
        if "group" not in script.code(target.value):
            continue
        origins = [script.code(one) for one in draft.bindings.origins(assign.value)]
        if any("group" in one or "get_last_lr" in one or "['lr']" in one or '["lr"]' in one for one in origins):
            draft.better(
                assign,
                "this learning rate seems to be computed from the scaled one and is not changed.",
                f"check it: a value that does not come from the optimizer needs `* {draft.hvd}.size()`",
            )
        else:
            edits: tuple[Edit, ...] = draft.times(assign.value, f"{draft.hvd}.size()")
            draft.change(assign, "the learning rate that is set here is scaled too.", *edits)
