"""Changes a Keras script for one process to train on many ranks: compile, fit, callbacks."""

from __future__ import annotations

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.findings import Edit
from hvdkit_migrate.names import dotted_name
from hvdkit_migrate.script import argument, last

#: Keras's default learning rates, by the name that compile() accepts.
_BY_NAME = {
    "adam": ("Adam", "0.001"),
    "adamw": ("AdamW", "0.001"),
    "adamax": ("Adamax", "0.001"),
    "nadam": ("Nadam", "0.001"),
    "sgd": ("SGD", "0.01"),
    "rmsprop": ("RMSprop", "0.001"),
    "adagrad": ("Adagrad", "0.001"),
    "adadelta": ("Adadelta", "0.001"),
    "lion": ("Lion", "0.001"),
}
_DEFAULT = dict(_BY_NAME.values())
_ON_RANK_ZERO = ("ModelCheckpoint", "TensorBoard", "CSVLogger", "EarlyStopping")


def distribute_fit(draft: Draft) -> None:
    """Wrap optimizers in compile(), shard the data of fit(), add callbacks."""
    script = draft.script
    fits = [call for call in script.all(cst.Call) if last(call) in ("fit", "fit_generator") and _is_model(draft, call)]
    compiles = [call for call in script.all(cst.Call) if last(call) == "compile" and _is_model(draft, call)]
    wrapped: set[cst.CSTNode] = set()
    for call in compiles:
        _wrap(draft, call, wrapped)
    for call in fits:
        _fit(draft, call)
    _load_models(draft, fits)
    _replace_callbacks(draft)
    _report_loops(draft, fits)
    _report_other_files(draft, compiles, fits)


def _report_other_files(draft: Draft, compiles: list[cst.Call], fits: list[cst.Call]) -> None:
    """Report what another file may contain: the compile() of a model, or its training."""
    script = draft.script
    if fits and not compiles and not script.calls("keras.models.load_model", "keras.saving.load_model"):
        draft.breaks(
            fits[0],
            "no compile() in this file: the optimizer may not be wrapped.",
            f"optimizer={draft.hvd}.DistributedOptimizer(optimizer) in compile(); then the comment `# hvdkit: ok` here",
        )
    if compiles and not fits:
        draft.breaks(
            compiles[0],
            "no fit() in this file: every rank may train on the same data.",
            f"fit({draft.hvd}.shard(x), {draft.hvd}.shard(y), callbacks=[{draft.hvd}.callbacks."
            "BroadcastGlobalVariablesCallback(0), ...]) where it is trained; then the comment `# hvdkit: ok` here",
        )
    for arg in script.all(cst.Arg):
        if arg.keyword is not None and arg.keyword.value == "stateful" and script.code(arg.value) == "True":
            draft.breaks(
                arg,
                "a stateful layer depends on the order of the batches, which sharding would change.",
                "a contiguous part for each rank r, x[r * n : (r + 1) * n], and the comment `# hvdkit: ok` here",
            )


def _is_model(draft: Draft, call: cst.Call) -> bool:
    if not isinstance(call.func, cst.Attribute) or draft.script.name(call):
        return False
    made = [draft.script.name(one) for one in draft.bindings.origins(call.func.value)]
    others = ("sklearn.", "xgboost.", "lightgbm.", "re.", "catboost.")
    return not any(name.startswith(others) for name in made) and last(call.func.value) not in (
        "scaler",
        "encoder",
        "re",
    )


def _wrap(draft: Draft, call: cst.Call, wrapped: set[cst.CSTNode]) -> None:
    script, hvd = draft.script, draft.hvd
    given = argument(call, "optimizer", 0)
    if given is None:
        text = f"optimizer={hvd}.DistributedOptimizer({_class(draft, 'RMSprop', call)}(0.001 * {hvd}.size()))"
        if any(arg.star for arg in call.args):
            draft.breaks(call, "the optimizer is not visible.", f"optimizer={hvd}.DistributedOptimizer(optimizer)")
        else:
            draft.change(
                call,
                "wraps Keras's default optimizer, which steps on the gradients of all ranks.",
                draft.add_argument(call, text),
            )
        return
    value = given.value
    if isinstance(value, cst.SimpleString):
        kind = _BY_NAME.get(str(value.raw_value).lower())
        if kind is None:
            draft.breaks(call, f"{value.value} is not an optimizer of Keras.", f"{hvd}.DistributedOptimizer(an object)")
            return
        text = f"{hvd}.DistributedOptimizer({_class(draft, kind[0], call)}({kind[1]} * {hvd}.size()))"
        draft.change(
            call,
            "wraps the optimizer, which steps on the gradients of all ranks, and scales the learning rate.",
            draft.replace(value, text),
        )
        return
    makers = draft.bindings.origins(value)
    if any(isinstance(one, cst.SimpleString) for one in makers) or not all(isinstance(one, cst.Call) for one in makers):
        draft.breaks(
            call,
            f"the construction of `{script.code(value)}` is not visible; its learning rate has to be scaled.",
            f"{hvd}.DistributedOptimizer(keras.optimizers.get({script.code(value)})), its learning rate * {hvd}.size()",
        )
        return
    if any(one in wrapped for one in makers):
        draft.breaks(
            call,
            "this optimizer is already wrapped at an earlier compile().",
            "a separate optimizer for each compile()",
        )
        return
    wrapped |= set(makers)
    edits = list(draft.around(value, f"{hvd}.DistributedOptimizer(", ")"))
    for one in makers:
        assert isinstance(one, cst.Call)
        edits += _scale(draft, one)
    draft.change(
        call, "wraps the optimizer, which steps on the gradients of all ranks, and scales the learning rate.", *edits
    )


def _scale(draft: Draft, call: cst.Call) -> list[Edit]:
    """Return the edits that scale the learning rate of an optimizer in its constructor."""
    script, size = draft.script, f"{draft.hvd}.size()"
    own = draft.script.name(call).rpartition(".")[2]
    if "LossScaleOptimizer" in own and call.args:
        inner = [one for one in draft.bindings.origins(call.args[0].value) if isinstance(one, cst.Call)]
        return [edit for one in inner for edit in _scale(draft, one)]
    rate = argument(call, "learning_rate", 0) or argument(call, "lr")
    if rate is None:
        if own not in _DEFAULT or any(arg.star for arg in call.args):
            draft.breaks(call, "its learning rate is not visible.", f"learning_rate=rate * {size}")
            return []
        return [draft.add_argument(call, f"learning_rate={_DEFAULT[own]} * {size}")]
    schedules = [
        one
        for one in draft.bindings.origins(rate.value)
        if isinstance(one, cst.Call) and "schedules" in script.name(one)
    ]
    if schedules:
        draft.breaks(
            schedules[0],
            "the schedule counts the steps of one process and sets unscaled learning rates.",
            f"initial_learning_rate=... * {size}, decay_steps=... // {size}; then the comment `# hvdkit: ok` here",
        )
        return []
    return list(draft.times(rate.value, size))


def _class(draft: Draft, name: str, at: cst.CSTNode) -> str:
    """Return the name of keras.optimizers.NAME at a node."""
    module = draft.script.names.local_name("keras.optimizers", at)
    return f"{module}.{name}" if module else f"{draft.need_import('keras', at)}.optimizers.{name}"


def _fit(draft: Draft, call: cst.Call) -> None:
    script, hvd = draft.script, draft.hvd
    if any(arg.star for arg in call.args):
        draft.breaks(call, "the data of this fit() are not visible.", f"x={hvd}.shard(x), y={hvd}.shard(y) in it")
        return
    edits: list[Edit] = []
    x = argument(call, "x", 0) or argument(call, "generator")
    if x is None:
        draft.breaks(call, "the data of this fit() are not visible.", f"x={hvd}.shard(x), y={hvd}.shard(y) in it")
        return
    makers = draft.bindings.origins(x.value)
    if any(_is_generator(draft, one) for one in makers):
        draft.breaks(
            call,
            "a generator: every rank would train on all samples.",
            f"a generator that yields every {hvd}.size()-th batch from number {hvd}.rank() on, with "
            f"steps_per_epoch=steps // {hvd}.size(); then the comment `# hvdkit: ok`. Arrays, a PyDataset or a "
            "tf.data.Dataset need nothing else",
        )
    else:
        for keyword, position in (("x", 0), ("y", 1), ("sample_weight", None)):
            given = x if keyword == "x" else argument(call, keyword, position)
            if given is not None and script.code(given.value) != "None":
                edits += draft.around(given.value, f"{hvd}.shard(", ")")
        draft.change(call, "each rank trains on its shard of the samples; batch_size is per rank.", *edits)
        _seed_shuffles(draft)
    validation = argument(call, "validation_data", 7)
    parts = validation.value.elements if validation is not None and isinstance(validation.value, cst.Tuple) else ()
    if validation is not None and parts and not any(script.code(one.value) == "None" for one in parts):
        share = draft.around(validation.value, f"{hvd}.shard(", ", evaluation=True)")
        draft.change(call, "validation is sharded; MetricAverageCallback averages the metrics.", *share)
    steps = argument(call, "steps_per_epoch")
    if steps is not None and script.code(steps.value) != "None":
        simple = isinstance(steps.value, (cst.Name, cst.Attribute, cst.Integer, cst.Call))
        text = script.code(steps.value) if simple else f"int({script.code(steps.value)})"
        draft.change(
            call, "each rank takes its share of the steps.", draft.replace(steps.value, f"{text} // {hvd}.size()")
        )
    _add_callbacks(draft, call)


def _is_generator(draft: Draft, node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.GeneratorExp):
        return True
    if not isinstance(node, cst.Call):
        return False
    if any(draft.script.inside(one, cst.Yield) for one in draft.bindings.called(node)):
        return True
    return last(node) in ("flow", "flow_from_directory", "flow_from_dataframe", "from_generator")


def _seed_shuffles(draft: Draft) -> None:
    """Give shuffles of a tf.data.Dataset a seed: all ranks need the same order before it is sharded."""
    for call in draft.script.all(cst.Call):
        seeded = any(arg.keyword is not None and arg.keyword.value == "seed" for arg in call.args)
        if not seeded and (last(call).endswith("_dataset_from_directory") or _shuffles_dataset(draft, call)):
            edit = draft.add_argument(call, "seed=0")
            draft.change(call, "all ranks shuffle with the same seed, so that their shards are disjoint.", edit)


def _shuffles_dataset(draft: Draft, call: cst.Call) -> bool:
    if last(call) != "shuffle" or not isinstance(call.func, cst.Attribute) or len(call.args) != 1:
        return False
    if draft.script.name(call) or not draft.script.imports_from("tensorflow"):
        return False
    made = [draft.script.name(one) for one in draft.bindings.origins(call.func.value)]
    random = any(name.startswith(("numpy.random", "random.", "sklearn.")) for name in made)
    return not random and not any(word in draft.script.code(call.func.value).lower() for word in ("rng", "random"))


def _add_callbacks(draft: Draft, call: cst.Call) -> None:
    script, hvd = draft.script, draft.hvd
    ours = f"{hvd}.callbacks.BroadcastGlobalVariablesCallback(0), {hvd}.callbacks.MetricAverageCallback()"
    what = "broadcasts the initial weights, and averages metrics over all ranks."
    given = argument(call, "callbacks", 5)
    if given is None or script.code(given.value) == "None":
        text = f"callbacks=[{ours}]"
        edit = draft.add_argument(call, text) if given is None else draft.replace(given, text)
        draft.change(call, what, edit)
    elif isinstance(given.value, cst.List):
        at = script.span(given.value)[0] + 1
        elements = given.value.elements
        separate = not elements or script.line(elements[0]) == script.line(given.value)
        edit = (
            Edit(at, at, ours + (", " if elements else ""))
            if separate
            else draft.before_element(elements[0], f"{ours},")
        )
        draft.change(call, what, edit)
    else:
        lists = [one for one in draft.bindings.origins(given.value) if isinstance(one, cst.List)]
        text = script.code(given.value)
        spread = f"*{text}" if lists or not isinstance(given.value, cst.Call) else text
        made = [one for one in draft.bindings.origins(given.value) if isinstance(one, cst.Call)]
        if not lists and made:
            spread = text
        draft.change(call, what, draft.replace(given.value, f"[{ours}, {spread}]"))


def _replace_callbacks(draft: Draft) -> None:
    script, hvd = draft.script, draft.hvd
    for call in script.all(cst.Call):
        name = script.name(call)
        if not name.startswith("keras.callbacks."):
            continue
        own = name.rpartition(".")[2]
        if own in _ON_RANK_ZERO:
            what = "stops all ranks together." if own == "EarlyStopping" else "writes on rank 0 only."
            draft.change(call, what, draft.replace(call.func, f"{hvd}.callbacks.{own}"))
        elif own == "LearningRateScheduler":
            draft.breaks(
                call,
                "its function returns unscaled learning rates.",
                f"the function's result * {hvd}.size(), and the comment `# hvdkit: ok` here",
            )
        elif own in ("BackupAndRestore", "RemoteMonitor"):
            draft.breaks(call, f"{own} would write on every rank.", f"{hvd}.callbacks.on_rank_zero(...), or remove it")
    for one in script.all(cst.ClassDef):
        if any(script.name(base.value).startswith("keras.callbacks.") for base in one.bases):
            draft.better(
                one,
                "a custom callback runs on every rank.",
                f"{hvd}.callbacks.on_rank_zero(...) around it if it writes or prints",
            )


def _load_models(draft: Draft, fits: list[cst.Call]) -> None:
    script = draft.script
    for call in script.calls("keras.models.load_model", "keras.saving.load_model"):
        trained = [
            fit
            for fit in fits
            if isinstance(fit.func, cst.Attribute) and call in draft.bindings.origins(fit.func.value)
        ]
        if trained:
            draft.change(
                call, "wraps the optimizer of the loaded model.", draft.replace(call.func, f"{draft.hvd}.load_model")
            )


def _report_loops(draft: Draft, fits: list[cst.Call]) -> None:
    script = draft.script
    for call in script.all(cst.Call):
        if last(call) == "train_on_batch":
            draft.breaks(
                call,
                "a custom loop has to shard its data and broadcast the initial weights itself.",
                f"{draft.hvd}.shard(data) before it, {draft.hvd}.broadcast_model(model) at its start; then the comment "
                "`# hvdkit: ok`",
            )
        elif script.name(call) == "tensorflow.GradientTape" and not fits:
            draft.breaks(
                call,
                "a training loop with tf.GradientTape, which this command does not rewrite.",
                "the 10 lines of examples/tensorflow2_digits.py",
            )
        elif last(call) == "evaluate" and _is_model(draft, call) and isinstance(call.func, cst.Attribute):
            draft.better(
                call,
                "every rank evaluates all samples: correct, but not sharded.",
                f"{draft.hvd}.evaluate({script.code(call.func.value)}, *{draft.hvd}.shard((x, y), evaluation=True))",
            )
    for call in fits:
        name = script.code(call.func.value) if isinstance(call.func, cst.Attribute) else ""
        if not dotted_name(call.func) and name:
            draft.better(call, "the model has no name here.", "model = ..., if the script uses it again")
