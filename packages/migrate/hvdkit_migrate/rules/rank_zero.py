"""Restricts work to rank 0 that one process does for all: printing, saving, progress bars, loggers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.script import last, matches

#: Functions that write files or windows.
_WRITERS = (
    *("shutil.copyfile", "shutil.copy", "shutil.move", "os.rename", "os.replace", "os.remove", "os.unlink"),
    *("torch.save", "torch.jit.save", "torch.onnx.export", "numpy.save", "numpy.savez", "numpy.savetxt"),
    *("joblib.dump", "keras.utils.plot_model", "wandb.log", "wandb.save", "wandb.watch", "wandb.finish"),
    *("matplotlib.pyplot.savefig", "matplotlib.pyplot.show", "torchvision.utils.save_image", "mlflow."),
    *("keras.models.save_model", "torchsummary.summary", "torchinfo.summary", "pprint.pprint", "sys.stdout.write"),
)
#: Methods that do, by the class of their object.
_WRITING_METHODS = {
    "SummaryWriter": (
        "add_scalar",
        "add_scalars",
        "add_histogram",
        "add_image",
        "add_graph",
        "add_text",
        "flush",
        "close",
    ),
}
#: Methods that do, for objects of any class.
_SAVING = ("save_pretrained", "save_weights", "summary", "savefig", "to_csv")
#: Classes whose methods run in a loader's processes, or in every forward pass.
_INNER = ("Dataset", "Sampler", "Module", "Function", "Callback", "Sequence", "PyDataset")


def guard_rank_zero(draft: Draft, *, keras: bool = False) -> None:
    """Put prints and saves under `if hvd.rank() == 0`, and show progress bars there only."""
    for block in _blocks(draft):
        group: list[cst.SimpleStatementLine] = []
        for statement in [*block, None]:
            if (
                statement is not None
                and isinstance(statement, cst.SimpleStatementLine)
                and _is_output(draft, statement, keras)
            ):
                group.append(statement)
            elif group:
                what = "only rank 0 prints." if all(_prints(one) for one in group) else "only rank 0 writes files."
                draft.change(group[0], what, *draft.guard(group, f"{draft.hvd}.rank() == 0"))
                group = []
    _guard_short_ifs(draft, keras)
    _hide_bars(draft)
    _share_folders(draft)
    _quieten_loggers(draft)
    _report_files(draft)


def _guard_short_ifs(draft: Draft, keras: bool) -> None:
    """Add a second condition to `if x: print(y)` on one line."""
    for one in draft.script.all(cst.If):
        body = one.body
        if (
            not isinstance(body, cst.SimpleStatementSuite)
            or one.orelse is not None
            or not draft.script.is_in_block(one)
        ):
            continue
        calls = [part.value for part in body.body if isinstance(part, cst.Expr) and isinstance(part.value, cst.Call)]
        is_output = len(calls) == len(body.body) and all(_writes(draft, call, keras) for call in calls)
        own = any(draft.bindings.called(call) for call in draft.script.inside(one, cst.Call))
        if is_output and not own and not _is_inner(draft, one) and not _is_for_rank(draft, one):
            simple = isinstance(one.test, (cst.Name, cst.Comparison, cst.Call, cst.Attribute))
            before, after = ("", "") if simple else ("(", ")")
            edits = draft.around(one.test, before, f"{after} and {draft.hvd}.rank() == 0")
            draft.change(one, "only rank 0 prints.", *edits)


def _blocks(draft: Draft) -> Iterator[Iterable[Any]]:
    yield draft.script.tree.body
    for block in draft.script.all(cst.IndentedBlock):
        if not _is_inner(draft, block) and not _is_for_rank(draft, block):
            yield block.body


def _is_inner(draft: Draft, block: cst.CSTNode) -> bool:
    """Is this code that runs outside of the script's main flow?"""
    for above in draft.script.above(block):
        if isinstance(above, cst.ClassDef) and any(draft.script.code(base).endswith(_INNER) for base in above.bases):
            return True
        if isinstance(above, cst.FunctionDef) and _is_handed_over(draft, above):
            return True
    return False


def _is_handed_over(draft: Draft, function: cst.FunctionDef) -> bool:
    """Is the function passed to another one, for example as a collate_fn?"""
    return any(
        isinstance(arg.value, cst.Name) and function in draft.script.names.definitions(arg.value)
        for arg in draft.script.all(cst.Arg)
        if arg.keyword
    )


def _is_for_rank(draft: Draft, block: cst.CSTNode) -> bool:
    """Is it under a condition on the rank already?"""
    above = [block, *draft.script.above(block)]
    return any(isinstance(one, cst.If) and "rank" in draft.script.code(one.test) for one in above)


def _is_output(draft: Draft, statement: cst.SimpleStatementLine, keras: bool) -> bool:
    if draft.script.span(statement)[0] < draft.ready or draft.is_silenced(statement):
        return False
    values = [one.value for one in statement.body if isinstance(one, cst.Expr)]
    if len(values) < len(statement.body) or not all(isinstance(one, cst.Call) for one in values):
        return False
    if not all(_writes(draft, one, keras) for one in values if isinstance(one, cst.Call)):
        return False
    return not any(draft.bindings.called(call) for call in draft.script.inside(statement, cst.Call))


def _prints(statement: cst.SimpleStatementLine) -> bool:
    return all(isinstance(one, cst.Expr) and last(one.value) in ("print", "pprint") for one in statement.body)


def _writes(draft: Draft, call: cst.Call, keras: bool) -> bool:
    if isinstance(call.func, cst.Name) and call.func.value == "print" and draft.script.names.is_builtin(call.func):
        return True
    if matches(draft.script.name(call), _WRITERS):
        return True
    if not isinstance(call.func, cst.Attribute):
        return False
    if last(call) in _SAVING or (keras and last(call) == "save"):
        return True
    if any(last(call) in methods for methods in _WRITING_METHODS.values()):
        made = [last(one) for one in draft.bindings.origins(call.func.value) if isinstance(one, cst.Call)]
        return any(last(call) in _WRITING_METHODS.get(one, ()) for one in made) or "writer" in draft.script.code(
            call.func
        )
    return False


def _hide_bars(draft: Draft) -> None:
    for call in draft.script.all(cst.Call):
        is_bar = last(call) in ("tqdm", "trange") and draft.script.name(call).startswith("tqdm")
        if is_bar and not any(arg.keyword is not None and arg.keyword.value == "disable" for arg in call.args):
            draft.change(
                call,
                "only rank 0 shows the progress bar.",
                draft.add_argument(call, f"disable={draft.hvd}.rank() != 0"),
            )


def _share_folders(draft: Draft) -> None:
    for call in draft.script.calls("os.makedirs"):
        if len(call.args) == 1 and not call.args[0].star:
            draft.change(call, "another rank may create the folder first.", draft.add_argument(call, "exist_ok=True"))
    for call in draft.script.calls("os.mkdir"):
        if len(call.args) == 1 and isinstance(call.func, cst.Attribute):
            draft.change(
                call,
                "another rank may create the folder first.",
                draft.replace(call.func.attr, "makedirs"),
                draft.add_argument(call, "exist_ok=True"),
            )
        else:
            draft.breaks(call, "another rank may create the folder first.", "os.makedirs(path, exist_ok=True)")


def _quieten_loggers(draft: Draft) -> None:
    for call in draft.script.calls("wandb.init"):
        if any(arg.keyword is not None and arg.keyword.value == "mode" for arg in call.args):
            draft.breaks(
                call, "every rank would create a run.", f'mode="online" if {draft.hvd}.rank() == 0 else "disabled"'
            )
        else:
            mode = f'mode=None if {draft.hvd}.rank() == 0 else "disabled"'
            draft.change(call, "only rank 0 creates a run.", draft.add_argument(call, mode))
    for call in draft.script.all(cst.Call):
        if last(call) == "SummaryWriter":
            draft.better(
                call,
                "every rank creates an event file; those of other ranks than 0 stay empty.",
                f"SummaryWriter(...) if {draft.hvd}.rank() == 0 else None",
            )


def _report_files(draft: Draft) -> None:
    for call in draft.script.all(cst.Call):
        if last(call) == "open" and draft.script.names.is_builtin(call.func) and len(call.args) > 1:
            mode = draft.script.code(call.args[1].value).strip("'\"")
            if mode[:1] in ("w", "a", "x") and not _is_for_rank(draft, call):
                draft.better(
                    call,
                    "every rank writes this file, and they overwrite each other.",
                    f"if {draft.hvd}.rank() == 0: before it",
                )
