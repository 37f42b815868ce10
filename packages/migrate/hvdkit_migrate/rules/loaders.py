"""Gives DataLoaders a ShardedSampler, so that each rank trains on its own shard of the samples."""

from __future__ import annotations

import libcst as cst

from hvdkit_migrate.draft import Draft
from hvdkit_migrate.findings import Edit
from hvdkit_migrate.names import dotted_name
from hvdkit_migrate.script import argument, last
from hvdkit_migrate.training import Loader, Training

_DRAW = "every rank would draw from all samples"


def shard_loaders(draft: Draft, training: Training) -> None:
    """Shard the loaders for training; loaders for evaluation stay whole, on every rank."""
    for loader in training.loaders:
        _shard(draft, training, loader)
    for loader in training.loaders:
        if loader.sharded and loader.shuffled:
            _set_epochs(draft, training, loader)
    _count_own_samples(draft, training)
    _find_other_data(draft, training)


def _shard(draft: Draft, training: Training, loader: Loader) -> None:
    call, script = loader.call, draft.script
    shuffle = argument(call, "shuffle", 2)
    if loader.use == "evaluate" and shuffle is not None and script.code(shuffle.value) == "True":
        unseen = _may_train_elsewhere(draft, loader)
        if unseen is not None:
            draft.breaks(
                unseen,
                "this function is in another file; whether it trains on the samples of the loop is not visible.",
                f"sampler={draft.hvd}.data.ShardedSampler(dataset) instead of shuffle=True, if it does; "
                "the comment `# hvdkit: ok` here",
            )
            return
    if loader.use == "evaluate":
        draft.better(
            call,
            "every rank evaluates all samples: correct, but not sharded.",
            f"sampler={draft.hvd}.data.ShardedSampler(dataset, evaluation=True), {draft.hvd}.metrics.Mean for averages",
        )
        return
    if _cannot_shard(draft, training, loader):
        return
    asked = script.code(shuffle.value) if shuffle is not None else ""
    if loader.use == "unknown" and asked in ("", "False", "None") and not _has_keywords(call):
        if training.backwards or training.optimizers:
            draft.breaks(
                call,
                "no loop in this file iterates this DataLoader; whether it is used for training is not visible.",
                f"sampler={draft.hvd}.data.ShardedSampler(dataset) if it is; else the comment `# hvdkit: ok`",
            )
        return
    dataset = loader.dataset
    assert dataset is not None
    given, edits = _repeatable(draft, loader, dataset)
    if not given:
        draft.breaks(
            call,
            "the dataset is constructed inside the call and has no name.",
            f"dataset = ...; DataLoader(dataset, sampler={draft.hvd}.data.ShardedSampler(dataset), ...)",
        )
        return
    sampler = f"{draft.hvd}.data.ShardedSampler({given}"
    loader.sharded, loader.shuffled = True, True
    if (shuffle is None and not _has_keywords(call)) or asked in ("False", "None"):
        sampler, loader.shuffled = f"{sampler}, shuffle=False)", False
    elif asked in ("", "True"):
        sampler += ")"
    elif loader.use == "train" and not _may_evaluate(loader, training):
        sampler += f", shuffle={asked})"
    elif "train" in asked.lower():
        sampler += f") if {asked} else None"
    else:
        loader.sharded = loader.shuffled = False
        draft.breaks(
            call,
            f"used for training and evaluation with shuffle={asked}; which of them is not visible.",
            f"sampler={draft.hvd}.data.ShardedSampler({given}) if it is for training else None, instead of shuffle",
        )
        return
    if shuffle is not None:
        edits.append(draft.replace(shuffle, f"sampler={sampler}"))
    else:
        edits.append(draft.add_argument(call, f"sampler={sampler}"))
        edits += [
            draft.replace(arg, f'**{{**{script.code(arg.value)}, "shuffle": None}}')
            for arg in call.args
            if arg.star == "**"
        ]
    draft.change(call, "each rank trains on its shard of the samples; the batch size is per rank.", *edits)


def _may_train_elsewhere(draft: Draft, loader: Loader) -> cst.Call | None:
    """Find a call in a loop over the loader that is not of this file, and whose name suggests training."""
    for loop, _ in loader.loops:
        for call in draft.script.inside(loop.body, cst.Call):
            sounds = any(word in last(call).lower() for word in ("train", "step", "fit", "optimi", "learn", "backward"))
            if sounds and not draft.bindings.called(call) and draft.script.code(call.func) != "model.train":
                return call
    return None


def _may_evaluate(loader: Loader, training: Training) -> bool:
    return any(not training.trains(loop) for loop, _ in loader.loops)


def _has_keywords(call: cst.Call) -> bool:
    return any(arg.star == "**" for arg in call.args)


def _cannot_shard(draft: Draft, training: Training, loader: Loader) -> bool:
    """Report loaders that this tool cannot shard."""
    call, script, hvd = loader.call, draft.script, draft.hvd
    dataset = loader.dataset
    if dataset is None or any(arg.star == "*" for arg in call.args):
        draft.breaks(
            call, "the dataset of this DataLoader is not visible.", f"sampler={hvd}.data.ShardedSampler(dataset)"
        )
        return True
    for keyword, position in (("sampler", 3), ("batch_sampler", 4)):
        given = argument(call, keyword, position)
        if given is not None and script.code(given.value) != "None":
            draft.breaks(
                call,
                f"a custom {keyword}: {_DRAW}.",
                f"sampler={hvd}.data.ShardedSampler(dataset), or a {keyword} that takes the part of {hvd}.rank() of "
                f"{hvd}.size(), with as many batches on every rank",
            )
            return True
    shuffle = argument(call, "shuffle", 2)
    if shuffle is not None and shuffle.keyword is None and len(call.args) > 3 and call.args[3].keyword is None:
        draft.breaks(
            call,
            "shuffle is a positional argument with others after it.",
            f"DataLoader(dataset, batch_size, sampler={hvd}.data.ShardedSampler(dataset), ...) with keywords",
        )
        return True
    if any(_is_iterable(draft, origin) for origin in draft.bindings.origins(dataset)):
        draft.breaks(
            call,
            "an IterableDataset cannot be sharded by index: every rank would train on all samples.",
            f"in its __iter__ yield every {hvd}.size()-th sample from number {hvd}.rank() on, the same number of "
            f"samples on every rank, and put the comment `# hvdkit: ok` here",
        )
        return True
    kinds = (cst.DictComp, cst.ListComp, cst.GeneratorExp, cst.Lambda)
    if any(isinstance(one, kinds) for one in script.above(call)):
        draft.breaks(
            call,
            "loaders are constructed in a comprehension; which of them is for training is not visible.",
            f"separate statements: the training loader with sampler={hvd}.data.ShardedSampler(dataset) instead of "
            "shuffle=True, the others unchanged",
        )
        return True
    return False


def _is_iterable(draft: Draft, origin: cst.BaseExpression) -> bool:
    if not isinstance(origin, cst.Call):
        return False
    if "IterableDataset" in draft.script.name(origin):
        return True
    own = draft.bindings.made_by(origin)
    return any("IterableDataset" in draft.script.code(base) for one in own for base in one.bases)


def _repeatable(draft: Draft, loader: Loader, dataset: cst.BaseExpression) -> tuple[str, list[Edit]]:
    """Return an expression for the dataset, and the edits that assign it to a name if it has none; "" if impossible."""
    script = draft.script
    if dotted_name(dataset) or (isinstance(dataset, cst.Subscript) and dotted_name(dataset.value)):
        return script.code(dataset), []
    statement = script.statement(loader.call)
    if not isinstance(statement, cst.SimpleStatementLine) or not script.is_in_block(statement):
        return "", []
    name = _new_name(draft, loader)
    text = script.code(dataset)
    if "\n" in text and not isinstance(dataset, cst.Call):
        text = f"({text})"
    return name, [draft.before(statement, f"{name} = {text}"), draft.replace(dataset, name)]


def _new_name(draft: Draft, loader: Loader) -> str:
    for (_, name), bounds in draft.bindings.assigned.items():
        if any(bound.value is loader.call for bound in bounds) and "." not in name:
            stem = name.replace("dataloader", "dataset").replace("loader", "dataset")
            break
    else:
        stem = "dataset"
    return draft.fresh(stem if "dataset" in stem else f"{stem}_dataset")


def _set_epochs(draft: Draft, training: Training, loader: Loader) -> None:
    """Shuffle anew in each epoch, before each loop over the loader."""
    if not loader.loops:
        draft.breaks(
            loader.call,
            "the loop over this loader is in another file: without set_epoch the order is the same in every epoch.",
            "loader.sampler.set_epoch(epoch) at the start of each epoch",
        )
    for loop, iterated in loader.loops:
        simple = dotted_name(iterated) or isinstance(iterated, cst.Subscript)
        if not training.trains(loop) and not draft.script.inside(loop, cst.Yield):
            continue
        if not simple or not all(
            one.sharded and one.shuffled for one in training.loader_of(iterated) or [Loader(loader.call)]
        ):
            draft.breaks(
                loop,
                "the order of samples would be the same in every epoch; where set_epoch belongs is not certain.",
                "loader.sampler.set_epoch(epoch) at the start of each epoch, where the loader's sampler is sharded",
            )
            continue
        text = draft.script.code(iterated)
        epoch = _epoch_of(draft, loop) or f"{text}.sampler.epoch + 1"
        draft.change(
            loop,
            "the samples are reshuffled in each epoch.",
            draft.before(loop, f"{text}.sampler.set_epoch({epoch})"),
        )


def _epoch_of(draft: Draft, loop: cst.For) -> str:
    """Find the name that counts epochs around a loop over batches."""
    for above in draft.script.above(loop):
        if isinstance(above, cst.FunctionDef):
            params = (*above.params.params, *above.params.kwonly_params)
            return next(
                (one.name.value for one in params if one.name.value.lower() in ("epoch", "ep", "epoch_idx")), ""
            )
        if isinstance(above, cst.For) and isinstance(above.target, cst.Name) and above.target.value != "_":
            inner = draft.bindings.iterated(above.iter)[0]
            if isinstance(inner, cst.Call) and last(inner) in ("range", "trange"):
                return above.target.value
    return ""


def _count_own_samples(draft: Draft, training: Training) -> None:
    """Divide a rank's sums over its batches by its own number of samples."""
    for call in draft.script.all(cst.Call):
        if last(call) != "len" or len(call.args) != 1 or not draft.script.names.is_builtin(call.func):
            continue
        value = call.args[0].value
        if isinstance(value, cst.Attribute) and value.attr.value == "dataset":
            loaders = training.loader_of(value.value)
            if loaders and all(one.sharded for one in loaders):
                draft.change(call, "counts the samples of this rank's shard.", draft.replace(value.attr, "sampler"))
        elif dotted_name(value) and isinstance(draft.script.parent(call), cst.BinaryOperation):
            _count_dataset(draft, training, call, value)


def _count_dataset(draft: Draft, training: Training, call: cst.Call, dataset: cst.BaseExpression) -> None:
    script, operation = draft.script, draft.script.parent(call)
    assert isinstance(operation, cst.BinaryOperation)
    text = script.code(dataset)
    sharded = [one for one in training.loaders if one.sharded and one.dataset and script.code(one.dataset) == text]
    if not isinstance(operation.operator, (cst.Divide, cst.FloorDivide)) or not sharded:
        return
    function, at = script.function(call), script.span(call)[0]
    if at < script.span(sharded[0].call)[0] and script.function(sharded[0].call) is function:
        return  # before the loader exists: the whole dataset is meant, for example for a split
    names = [
        script.code(iterated)
        for loader in sharded
        for loop, iterated in loader.loops
        if script.function(loop) is function and dotted_name(iterated)
    ]
    if names:
        draft.change(call, "counts the samples of this rank's shard.", draft.replace(call, f"len({names[0]}.sampler)"))
    else:
        draft.breaks(
            call,
            f"len({text}) counts the samples of all ranks, but the sum is over the shard of one.",
            "len(loader.sampler)",
        )


def _find_other_data(draft: Draft, training: Training) -> None:
    """Report training whose samples do not come from a sharded loader."""
    script, bindings = draft.script, draft.bindings
    loops = [loop for loader in training.loaders for loop, _ in loader.loops]
    handled = [one for one in training.loaders if one.sharded or one.use == "train" or not one.loops]
    if any(not one.loops and (one.sharded or one.use == "unknown") for one in handled):
        return  # batches are taken elsewhere; other rules have reported what is not visible
    for backward in training.backwards:
        todo: list[cst.CSTNode] = [backward]
        seen: set[cst.CSTNode] = set()
        covered = False
        while todo and not covered:
            node = todo.pop()
            covered = any(above in loops for above in script.above(node))
            function = script.function(node)
            if function is not None and function not in seen:
                seen.add(function)
                todo += bindings.calls_of(function)
        if not covered:
            draft.breaks(
                backward,
                "the training data do not come from a DataLoader in this file: every rank would train on all of them.",
                f"shard them, as x = x[{draft.hvd}.rank() :: {draft.hvd}.size()] for a tensor (as many "
                "samples on every rank), or use a ShardedSampler where the loader is constructed; then the comment "
                "`# hvdkit: ok` here",
            )
