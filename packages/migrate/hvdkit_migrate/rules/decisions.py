"""Decisions that must be equal on all ranks: when to stop, when to lower the learning rate, whether a file exists."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.names import dotted_name
from hvdkit_migrate.script import last
from hvdkit_migrate.training import Training

_WRITES = ("torch.save", "keras.models.save_model", "keras.callbacks.ModelCheckpoint", "save_weights", "save")
_READS = ("torch.load", "keras.models.load_model", "keras.saving.load_model", "load_weights")


def agree(draft: Draft, training: Training) -> None:
    """Use rank 0's decision, or an average, if a decision depends on a rank's own numbers."""
    _average_plateaus(draft)
    _stop_together(draft, training)
    wait_for_files(draft)


def _average_plateaus(draft: Draft) -> None:
    script, hvd = draft.script, draft.hvd
    for call in script.all(cst.Call):
        if last(call) != "step" or not isinstance(call.func, cst.Attribute) or not call.args:
            continue
        made = [script.name(one) for one in draft.bindings.origins(call.func.value)]
        if not any(name.endswith("ReduceLROnPlateau") for name in made):
            continue
        torch = script.names.local_name("torch", call)
        if torch:
            value = call.args[0].value
            edits = draft.around(value, f"{hvd}.allreduce({torch}.tensor(float(", "))).item()")
            draft.change(call, "the metric is averaged, so that all ranks keep the same learning rate.", *edits)
        else:
            draft.breaks(
                call,
                "the metric differs between ranks, and so would the learning rate.",
                f"{hvd}.allreduce(torch.tensor(float(value))).item()",
            )


def _stop_together(draft: Draft, training: Training) -> None:
    script = draft.script
    for kind in (cst.Break, cst.Continue, cst.Return):
        for node in script.all(kind):
            loop = _training_loop(draft, training, node)
            if loop is None or (kind is cst.Continue and not _skips_training(draft, training, node, loop)):
                continue
            conditions = list(_conditions(draft, node, loop))
            own = [one for one in conditions if _depends_on_rank(draft, one.test, loop)]
            if not own:
                continue
            condition = conditions[-1]
            parent = script.parent(condition)
            direct = len(conditions) == 1 and parent is loop.body and kind is not cst.Return
            plain = not isinstance(condition.orelse, cst.If) and not script.inside(condition.test, cst.NamedExpr)
            if direct and plain and _decide(draft, condition, kind is cst.Continue):
                continue
            draft.breaks(
                node,
                f"this exit depends on `{script.code(own[0].test)}`, which may differ between ranks: "
                "ranks that continue would wait for those that stopped.",
                f"stop = {draft.hvd}.broadcast_object(stop, root_rank=0) on all ranks in each round, then `if stop:`",
            )


def _decide(draft: Draft, condition: cst.If, skips: bool) -> bool:
    """Give all ranks one decision: rank 0's, or if a bad value is skipped, that of any rank."""
    hvd, text = draft.hvd, draft.script.code(condition.test)
    if not skips and "nan" not in text.lower() and "finite" not in text.lower():
        edits = draft.around(condition.test, f"{hvd}.broadcast_object(bool(", "), root_rank=0)")
        draft.change(condition, "rank 0 decides for all ranks.", *edits)
        return True
    torch = draft.script.names.local_name("torch", condition)
    if torch:
        edits = draft.around(
            condition.test, f"{hvd}.allreduce({torch}.tensor(float(bool(", f"))), op={hvd}.Max).item() > 0"
        )
        draft.change(condition, "all ranks do this if any rank does.", *edits)
    return bool(torch)


def _training_loop(draft: Draft, training: Training, node: cst.CSTNode) -> cst.For | cst.While | None:
    """Return the loop that a break leaves, if it trains."""
    for above in draft.script.above(node):
        if isinstance(above, cst.FunctionDef):
            return None
        if isinstance(above, (cst.For, cst.While)):
            return above if training.trains(above.body) else None
    return None


def _skips_training(draft: Draft, training: Training, node: cst.CSTNode, loop: cst.For | cst.While) -> bool:
    end = draft.script.span(node)[1]
    return any(
        draft.script.span(call)[0] > end and (call in training.backwards or training.trains(call))
        for call in draft.script.inside(loop.body, cst.Call)
    )


def _conditions(draft: Draft, node: cst.CSTNode, loop: cst.CSTNode) -> Iterator[cst.If]:
    for above in draft.script.above(node):
        if above is loop:
            return
        if isinstance(above, cst.If):
            yield above


def _depends_on_rank(draft: Draft, test: cst.BaseExpression, loop: cst.CSTNode) -> bool:
    """May a condition differ between ranks? Not if it depends only on counters and on values set before the loop."""
    script = draft.script
    counters = set()
    for above in (loop, *script.above(loop)):
        if isinstance(above, cst.For):
            names = script.inside(above.target, cst.Name)
            called = last(above.iter) if isinstance(above.iter, cst.Call) else ""
            counters |= {
                one.value for one in (names if called == "range" else names[:1] if called == "enumerate" else ())
            }
    counters |= {dotted_name(one.target) for one in script.all(cst.AugAssign) if isinstance(one.value, cst.Integer)}
    outer = next((a for a in reversed([loop, *script.above(loop)]) if isinstance(a, (cst.For, cst.While))), loop)
    assigned = {
        dotted_name(target.target) for assign in script.inside(outer, cst.Assign) for target in assign.targets
    } | {dotted_name(one.target) for one in script.inside(outer, cst.AugAssign)}
    samples = _samples(draft, outer)
    for one in script.inside(test, cst.Name):
        if one.value in counters and one.value not in _conditional(draft, outer):
            continue
        if one.value in assigned or one.value in samples:
            return True
        around = script.parent(one)
        if isinstance(around, cst.Attribute) and dotted_name(around) in assigned:
            return True
    for call in script.inside(test, cst.Call):
        if script.name(call).startswith(("time.", "random.", "numpy.random.")) or draft.bindings.called(call):
            return True
        if isinstance(call.func, cst.Attribute) and dotted_name(call.func.value) and not script.name(call):
            return True
    return "early" in script.code(test).lower()


def _conditional(draft: Draft, outer: cst.CSTNode) -> set[str]:
    """Find counters that do not count in every iteration."""
    found = set()
    for one in draft.script.inside(outer, cst.AugAssign):
        for above in draft.script.above(one):
            if above is outer:
                break
            if isinstance(above, cst.If):
                found.add(dotted_name(one.target))
    return found


def _samples(draft: Draft, outer: cst.CSTNode) -> set[str]:
    """Find the names that loops give to samples, without the counters."""
    found: set[str] = set()
    for one in draft.script.inside(outer, cst.For):
        names = [name.value for name in draft.script.inside(one.target, cst.Name)]
        called = last(one.iter) if isinstance(one.iter, cst.Call) else ""
        found |= set(() if called in ("range", "trange") else names[1:] if called == "enumerate" else names)
    return found


def wait_for_files(draft: Draft) -> None:
    """Add a barrier between rank 0's write of a file and the read of it by all ranks."""
    script, bindings = draft.script, draft.bindings
    writes = [call for call in script.all(cst.Call) if _is_one_of(draft, call, _WRITES)]
    reads = [call for call in script.all(cst.Call) if _is_one_of(draft, call, _READS)]
    if not writes or not reads:
        return
    writing, reading = bindings.reaching(list(writes)), bindings.reaching(list(reads))
    for block in (script.tree, *script.all(cst.IndentedBlock)):
        written = False
        for statement in block.body:  # type: ignore[attr-defined]
            if isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
                continue
            calls = script.inside(statement, cst.Call)
            called = {function for call in calls for function in bindings.called(call)}
            if written and (any(call in reads for call in calls) or called & reading):
                if _is_alike(draft, statement):
                    draft.change(
                        statement,
                        "waits until rank 0 has written the file that is read here.",
                        draft.before(statement, f"{draft.hvd}.barrier()"),
                    )
                else:
                    draft.breaks(
                        statement,
                        "reads a file that rank 0 may not have written yet.",
                        f"{draft.hvd}.barrier() before it, where every rank calls it",
                    )
                written = False
            written = written or any(call in writes for call in calls) or bool(called & writing)


def _is_alike(draft: Draft, statement: cst.CSTNode) -> bool:
    """Does every rank execute this? Not for certain under an `if`, unless that is the script's guard."""
    for above in draft.script.above(statement):
        if (
            isinstance(above, (cst.If, cst.ExceptHandler))
            and "__name__" not in draft.script.code(above).partition(":")[0]
        ):
            return False
        if isinstance(above, cst.FunctionDef):
            return True
    return True


def _is_one_of(draft: Draft, call: cst.Call, names: tuple[str, ...]) -> bool:
    name = draft.script.name(call)
    if isinstance(call.func, cst.Attribute) and not name:
        return last(call) in names
    return name in names
