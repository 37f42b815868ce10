"""Changes code for Keras 2 that Keras 3 does not accept."""

from __future__ import annotations

import re

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.findings import Edit
from hvdkit_migrate.names import dotted_name
from hvdkit_migrate.script import argument, last

_LAYER_MODULES = (
    *("core", "convolutional", "normalization", "advanced_activations", "pooling", "merge", "recurrent", "embeddings"),
    *("noise", "local", "wrappers", "convolutional_recurrent"),
)
_GENERATORS = {"fit_generator": "fit", "evaluate_generator": "evaluate", "predict_generator": "predict"}
_NOT_IN_FIT = ("workers", "use_multiprocessing", "max_queue_size", "pickle_safe", "nb_worker", "max_q_size")
_RENAMED = {"nb_epoch": "epochs", "nb_val_samples": "validation_steps"}
_GONE_METHODS = {"predict_classes": "model.predict(x).argmax(axis=-1)", "predict_proba": "model.predict(x)"}


def adapt_keras2_habits(draft: Draft) -> None:
    """Rewrite code of Keras 2 for Keras 3."""
    _mend_imports(draft)
    _mend_optimizers(draft)
    _mend_methods(draft)
    _mend_rates(draft)
    mend_checkpoints(draft)


def _mend_imports(draft: Draft) -> None:
    script = draft.script
    for one in script.all(cst.ImportFrom):
        module = dotted_name(one.module)
        match = re.fullmatch(r"((?:tensorflow\.)?keras)\.layers\.(\w+)", module)
        if one.module is not None and match and match[2] in _LAYER_MODULES:
            draft.change(
                one, "Keras 3 has all layers in keras.layers.", draft.replace(one.module, f"{match[1]}.layers")
            )
        if module in ("keras.utils", "tensorflow.keras.utils") and not isinstance(one.names, cst.ImportStar):
            only = one.names[0] if len(one.names) == 1 else None
            if only is not None and dotted_name(only.name) == "np_utils" and only.asname is None:
                base = module.rpartition(".")[0]
                draft.change(
                    one,
                    "Keras 3 has the functions of np_utils in utils.",
                    draft.replace(one, f"from {base} import utils as np_utils"),
                )
        if module in ("keras.utils.np_utils", "tensorflow.keras.utils.np_utils") and one.module is not None:
            draft.change(one, "Keras 3 has them in keras.utils.", draft.replace(one.module, module.rpartition(".")[0]))
        names = [] if isinstance(one.names, cst.ImportStar) else [dotted_name(alias.name) for alias in one.names]
        if module == "keras.preprocessing.image" and names == ["ImageDataGenerator"] and one.module is not None:
            place = draft.replace(one.module, "keras.src.legacy.preprocessing.image")
            draft.change(one, "Keras 3 keeps ImageDataGenerator in this legacy module and may remove it.", place)
    for node in [*script.all(cst.Attribute), *script.all(cst.Name)]:
        parent = script.parent(node)
        called = isinstance(parent, cst.Call) and parent.func is node
        if called and script.name(node).endswith("ImageDataGenerator") and not draft.is_distributed:
            draft.breaks(
                node,
                "it draws random images on every rank, from the whole dataset.",
                "keras.utils.image_dataset_from_directory or arrays, with layers such as keras.layers.RandomFlip. "
                f"To keep it: a part of the data for each rank, {draft.hvd}.shard((x, y)), steps // {draft.hvd}.size() "
                "and the comment `# hvdkit: ok`",
            )


def _mend_optimizers(draft: Draft) -> None:
    script = draft.script
    for node in script.all(cst.Attribute):
        if script.name(node).startswith("keras.optimizers.legacy.") and node.attr.value[:1].isupper():
            value = node.value
            if isinstance(value, cst.Attribute) and value.attr.value == "legacy":
                edit = Edit(script.span(value.value)[1], script.span(value)[1], "")
                draft.change(node, "Keras 3 has no optimizers.legacy.", edit)
    for call in script.all(cst.Call):
        name = script.name(call)
        if not name.startswith("keras.optimizers.") or not name.rpartition(".")[2][:1].isupper():
            continue
        rate = argument(call, "lr")
        if rate is not None and rate.keyword is not None:
            draft.change(call, "Keras 3 calls it learning_rate.", draft.replace(rate.keyword, "learning_rate"))
        decay = argument(call, "decay")
        if decay is not None and "schedules" not in name:
            if script.code(decay.value) in ("0", "0.0", "0."):
                draft.change(call, "Keras 3 has no decay; it was 0.", *draft.remove_arguments(call, [decay]))
            else:
                draft.breaks(
                    call,
                    "Keras 3's optimizers have no decay.",
                    f"learning_rate=keras.optimizers.schedules.InverseTimeDecay(rate * {draft.hvd}.size(), 1, "
                    f"{script.code(decay.value)})",
                )


def _mend_methods(draft: Draft) -> None:
    script = draft.script
    for call in script.all(cst.Call):
        method = last(call)
        if not isinstance(call.func, cst.Attribute):
            continue
        if method in _GENERATORS:
            new = [draft.replace(call.func.attr, _GENERATORS[method])]
            first = argument(call, "generator")
            if first is not None and first.keyword is not None:
                new.append(draft.replace(first.keyword, "x"))
            draft.change(call, f"Keras 3's {_GENERATORS[method]} accepts generators.", *new)
        if method in ("fit", *_GENERATORS) and _is_keras(draft, call):
            keywords = {arg.keyword.value: arg for arg in call.args if arg.keyword}
            old = [name for name in keywords if name in _NOT_IN_FIT]
            if old:
                edits = draft.remove_arguments(call, [keywords[name] for name in old])
                draft.change(call, f"Keras 3 has no argument {', '.join(old)} here.", *edits)
            for name, keyword in _RENAMED.items():
                if name in keywords:
                    edit = draft.replace(keywords[name].keyword or call, keyword)
                    draft.change(call, f"Keras 3 calls {name} {keyword}.", edit)
        if method == "compile":
            flag = argument(call, "experimental_run_tf_function")
            if flag is not None:
                gone = draft.remove_arguments(call, [flag])
                draft.change(call, "Keras 3 has no experimental_run_tf_function.", *gone)
        if method == "variables" and not call.args and last(call.func.value) in ("optimizer", "opt", "optim"):
            end = script.span(call.func)[1]
            draft.change(call, "variables is an attribute in Keras 3.", Edit(end, script.span(call)[1], ""))
        if method in _GONE_METHODS and _is_keras(draft, call):
            draft.breaks(call, f"Keras 3 has no {method}.", _GONE_METHODS[method])


def _is_keras(draft: Draft, call: cst.Call) -> bool:
    """Is it Keras's fit(), not that of scikit-learn?"""
    if not isinstance(call.func, cst.Attribute):
        return False
    made = [draft.script.name(one) for one in draft.bindings.origins(call.func.value)]
    return not any(name.startswith(("sklearn.", "xgboost.", "lightgbm.")) for name in made)


def _mend_rates(draft: Draft) -> None:
    """Replace `optimizer.lr`, read, set or used in K.get_value and K.set_value."""
    script = draft.script
    for call in script.calls("keras.backend.get_value", "keras.backend.set_value"):
        if not call.args or not isinstance(call.args[0].value, cst.Attribute):
            continue
        rate = call.args[0].value
        if rate.attr.value not in ("lr", "learning_rate") or "opt" not in script.code(rate.value).lower():
            continue
        full = f"{script.code(rate.value)}.learning_rate"
        if last(call) == "get_value":
            edits = [draft.replace(call.func, "float"), draft.replace(rate.attr, "learning_rate")]
            draft.change(call, "Keras 3 has no get_value.", *edits)
        elif len(call.args) == 2 and isinstance(script.parent(call), cst.Expr):
            (start, end), (name, name_end) = script.span(call), script.span(rate)
            value, value_end = script.span(call.args[1])
            edits = [Edit(start, name, ""), draft.replace(rate.attr, "learning_rate")]
            edits += [Edit(name_end, value, " = "), Edit(value_end, end, "")]
            draft.change(call, "Keras 3 has no set_value.", *edits)
        else:
            draft.breaks(call, "Keras 3 has no set_value.", f"{full} = value, as a statement")
    for node in script.all(cst.Attribute):
        if node.attr.value == "lr" and last(node.value) in ("optimizer", "opt"):
            above = script.parent(node)
            inner = isinstance(above, cst.Arg) and script.name(script.parent(above)).startswith("keras.backend.")
            if not inner and not script.name(node):
                draft.change(node, "Keras 3 calls it learning_rate.", draft.replace(node.attr, "learning_rate"))


def mend_checkpoints(draft: Draft) -> None:
    """Rename files of Keras 2: ModelCheckpoint writes .keras and .weights.h5 only."""
    script = draft.script
    for call in script.all(cst.Call):
        if last(call) in ("ModelCheckpoint", "BestModelCheckpoint"):
            path = argument(call, "filepath", 0)
            weights = argument(call, "save_weights_only")
            ending = ".weights.h5" if weights is not None and script.code(weights.value) == "True" else ".keras"
            if path is not None:
                _rename_file(draft, call, path.value, ending)
            old = argument(call, "period")
            if old is not None and script.code(old.value) == "1":
                draft.change(call, "Keras 3 has no period.", *draft.remove_arguments(call, [old]))
            elif old is not None:
                draft.breaks(
                    call, "Keras 3 has no period; save_freq counts steps.", "save_freq=epochs * steps_per_epoch"
                )
        elif last(call) == "save_weights" and isinstance(call.func, cst.Attribute) and call.args:
            _rename_file(draft, call, call.args[0].value, ".weights.h5")


def _rename_file(draft: Draft, call: cst.Call, path: cst.BaseExpression, ending: str) -> None:
    script = draft.script
    names = [one for one in _strings(draft, path) if one.raw_value.endswith((".h5", ".hdf5"))]
    names = [one for one in names if not one.raw_value.endswith(ending)]
    for one in names:
        for same in script.all(cst.SimpleString):
            if same.value == one.value:
                text = one.prefix + one.quote + re.sub(r"(\.weights)?\.(h5|hdf5)$", ending, one.raw_value) + one.quote
                draft.change(same, f"Keras 3 writes {ending} files here.", draft.replace(same, text))
    if not names and not _strings(draft, path):
        draft.better(
            call, f"Keras 3 requires a path that ends in {ending} here, and this path is not visible.", f"...{ending}"
        )


def _strings(draft: Draft, path: cst.BaseExpression) -> list[cst.SimpleString]:
    """Find the constants with which a path may end."""
    found = []
    for origin in draft.bindings.origins(path):
        if isinstance(origin, cst.Call) and last(origin) == "format" and isinstance(origin.func, cst.Attribute):
            found += _strings(draft, origin.func.value)
        elif isinstance(origin, cst.Call) and last(origin) == "join" and origin.args:
            found += _strings(draft, origin.args[-1].value)
        elif isinstance(origin, cst.BinaryOperation):
            found += _strings(
                draft, origin.right if isinstance(origin.operator, (cst.Add, cst.Divide)) else origin.left
            )
        elif isinstance(origin, cst.SimpleString):
            found.append(origin)
        elif isinstance(origin, cst.Attribute):
            found += _option_default(draft, origin.attr.value)
    return found


def _option_default(draft: Draft, name: str) -> list[cst.SimpleString]:
    """Find the default of an argparse option, for `args.name`."""
    wanted = "--" + name.replace("_", "-")
    found = []
    for call in draft.script.all(cst.Call):
        if last(call) == "add_argument" and call.args and isinstance(call.args[0].value, cst.SimpleString):
            default = argument(call, "default")
            if call.args[0].value.raw_value.replace("_", "-") == wanted and default is not None:
                found += [default.value] if isinstance(default.value, cst.SimpleString) else []
    return found
