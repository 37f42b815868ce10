"""Causes of a difference between training on many ranks and on one; a function for each finds it in the records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hvdkit.tools.compare.records import Arrays, Difference, Loader, RankRecord, Step, apart, ratio

_SHARD = "Give each rank its own samples: sampler=hvd.data.ShardedSampler(dataset), or hvd.shard(...) in Keras."
_CLOSE = 0.05  # relative tolerance of a ratio that counts as a whole number


@dataclass(frozen=True)
class Cause:
    """A mistake. name: stable, for programs. seen: the evidence. cure: what to do."""

    name: str
    seen: str
    cure: str


def find_start(many: Sequence[RankRecord]) -> Iterator[Cause]:
    """Find ranks that start with parameters other than those of rank 0."""
    for record in many[1:]:
        name, size = apart(many[0].initial, record.initial)
        if name:
            yield Cause(
                "no-broadcast",
                f"before the first step {name} differs between ranks 0 and {record.rank} by {size:.1e} of its norm",
                "Broadcast the initial state: hvd.broadcast_parameters(model.state_dict(), root_rank=0), or in Keras "
                "BroadcastGlobalVariablesCallback(0).",
            )
            return


def find_drift(many: Sequence[RankRecord]) -> Iterator[Cause]:
    """Find ranks that start alike and diverge."""
    for number in range(min(len(record.steps) for record in many)):
        first = many[0].steps[number]
        for record in many[1:]:
            step = record.steps[number]
            name, size = apart(first.parameters, step.parameters)
            if not name:
                continue
            where = (
                f"after step {number + 1} {name} differs between ranks 0 and {record.rank} by {size:.1e} of its norm"
            )
            if first.rates != step.rates:
                seen = f"{where}; their learning rates were {first.rates} and {step.rates}"
                yield Cause("rates-differ", seen, "Use the same learning rate on every rank.")
            elif not first.gradients or apart(first.gradients, step.gradients)[0]:
                yield Cause(
                    "not-reduced",
                    f"{where}: each rank used its own gradients, not the average of all ranks",
                    "Wrap the optimizer, with all parameters that it trains: hvd.DistributedOptimizer(optimizer, ...).",
                )
            else:
                yield Cause(
                    "optimizer-state",
                    f"{where}, although gradients and learning rates are the same",
                    "Broadcast the optimizer's state too: hvd.broadcast_optimizer_state(optimizer, root_rank=0).",
                )
            return


def find_same_samples(many: Sequence[RankRecord]) -> Iterator[Cause]:
    """Find ranks that train on the same samples in one step."""
    for number in range(min(len(record.steps) for record in many)):
        first = set(many[0].steps[number].hashes)
        for record in many[1:]:
            other = set(record.steps[number].hashes)
            common = len(first & other)
            if min(len(first), len(other)) and common > 0.5 * min(len(first), len(other)):
                yield Cause(
                    "same-samples",
                    f"in step {number + 1} ranks 0 and {record.rank} have {common} of {len(first)} samples in common",
                    _SHARD,
                )
                return


def find_other_epoch(many: Sequence[RankRecord], one: RankRecord) -> Iterator[Cause]:
    """Find epochs with more or fewer samples than on one rank."""
    alone = {loader.number: loader for loader in one.loaders}
    for loader in many[0].loaders:
        parts = [part for record in many for part in record.loaders if part.number == loader.number]
        if loader.number not in alone or len(parts) != len(many):
            continue
        whole = alone[loader.number]
        joined = Loader(whole.number, whole.samples, sum(part.batch for part in parts), whole.drop_last)
        given, wanted = sum(map(_in_an_epoch, parts)), _in_an_epoch(joined)
        seen = f"in one epoch all ranks together train on {given} samples, one rank with the same batch on {wanted}"
        if given >= len(many) * wanted > wanted:
            yield Cause("whole-epoch", f"{seen}: each rank trains on the whole dataset", _SHARD)
        elif given < wanted:
            dropped = sum(part.samples for part in parts) - given
            why = f", {dropped} of them in an incomplete last batch" if dropped else ""
            yield Cause(
                "left-out",
                f"{seen}: {wanted - given} are never used{why}",
                "Remove drop_last=True, and shard the dataset with hvd.data.ShardedSampler, which pads it.",
            )


def find_scaled_rate(many: Sequence[RankRecord], one: RankRecord) -> Iterator[Cause]:
    """Find learning rates that are not scaled like the batch."""
    ranks, mine, alone = len(many), many[0].steps[0], one.steps[0]
    if not mine.first_rates or not alone.first_rates or not alone.first_rates[0]:
        return
    factor = mine.first_rates[0] / alone.first_rates[0]
    rates = f"the learning rate is {mine.first_rates[0]:g} on {ranks} ranks and {alone.first_rates[0]:g} on one rank"
    own = next((loader.batch for loader in one.loaders), 0)
    joined = sum(loader.batch for record in many for loader in record.loaders[:1])
    if joined and joined == own and factor > 1 + _CLOSE:
        yield Cause(
            "rate-scaled-for-nothing",
            f"{rates}, although the batch of all ranks together is the same as on one rank, {own} samples",
            "Do not scale the learning rate, or use the whole batch size on each rank.",
        )
    elif _is(factor, ranks**2):
        yield Cause(
            "rate-scaled-twice",
            f"{rates}: {factor:.3g} times as high, but the batch of {ranks} ranks is only {ranks} times as large",
            "Multiply by hvd.size() only once: either in the optimizer, or in a schedule or callback.",
        )


def explain(
    first: Difference, many: Sequence[RankRecord], one: RankRecord, repeats: Callable[[], bool]
) -> Iterator[Cause]:
    """Find the likely cause of the first difference in numbers.

    first: the difference.
    many: the records of the run on many ranks.
    one: the record of the run on one rank.
    repeats: runs one rank again, and returns whether the results are equal.
    """
    mine, alone = [record.steps[first.step] for record in many], one.steps[first.step]
    if any(step.random for step in (*mine, alone)):
        yield _RANDOM if repeats() else _NOT_DETERMINISTIC
        return
    found = [*_explain_batch_norm(many), *_explain_gradients(first, mine, alone, many[0].initial)]
    rows = sorted({step.rows for step in mine})
    if not found and len(rows) > 1:
        found.append(
            Cause(
                "unequal-batches",
                f"in step {first.step + 1} the ranks have {' and '.join(map(str, rows))} rows, so the average of their "
                f"means is not the mean of all rows",
                "Give all ranks the same number of rows, as hvd.data.ShardedSampler does.",
            )
        )
    if not found and not repeats():
        found.append(_NOT_DETERMINISTIC)
    yield from found


_RANDOM = Cause(
    "random-in-step",
    "the step draws random numbers (augmentation or noise) after it takes the batch, and they differ between ranks",
    "Draw them in the dataset, whose samples are the same in both runs, or turn them off for the comparison.",
)
_NOT_DETERMINISTIC = Cause(
    "not-deterministic",
    "two runs on one rank with the same batches and initial state also differ",
    "Seed the random numbers that a step draws (augmentation, noise), for example with torch.manual_seed(...).",
)


def _explain_batch_norm(many: Sequence[RankRecord]) -> Iterator[Cause]:
    layers = many[0].batch_norm
    if layers:
        yield Cause(
            "batch-norm",
            f"{layers[0]}{f' (and {len(layers) - 1} more)' if layers[1:] else ''} normalises by the batch of one rank",
            "Use hvd.SyncBatchNorm (Keras: BatchNormalization(synchronized=True)). Or accept the difference: with "
            "enough rows per rank, the model trains as well.",
        )


def _explain_gradients(first: Difference, mine: Sequence[Step], alone: Step, initial: Arrays) -> Iterator[Cause]:
    ranks = len(mine)
    total, loss = sum(step.loss or 0.0 for step in mine), alone.loss
    adds_up = bool(loss) and _is(total / (loss or 1.0), 1.0)
    if first.what == "gradients" or (first.what == "loss" and adds_up and alone.gradients):
        factor, cosine = ratio(mine[0].gradients, alone.gradients)
    elif first.what == "parameters" and first.step == 0 and not alone.gradients:  # Keras: use the first update
        factor, cosine = ratio(
            {name: value - initial.get(name, 0.0) for name, value in mine[0].parameters.items()},
            {name: value - initial.get(name, 0.0) for name, value in alone.parameters.items()},
        )
    else:
        return
    if cosine < 0.99:
        return
    if _is(factor, ranks):
        yield Cause(
            "sum",
            f"gradients are {factor:.3g} times those of one rank: they are summed, not averaged",
            "Use op=hvd.Average, the default of hvd.DistributedOptimizer.",
        )
    elif _is(factor * ranks, 1.0):
        yield Cause(
            "loss-is-a-sum",
            f"gradients are 1/{ranks} of those of one rank: the loss is a sum over samples, but ranks are averaged",
            'Use the mean over samples (reduction="mean"), or op=hvd.Sum in hvd.DistributedOptimizer.',
        )
    elif not _is(factor, 1.0):
        yield Cause(
            "scaled-gradients",
            f"gradients are {factor:.3g} times those of one rank",
            "Look for a multiplication or division by hvd.size() or by a number of batches.",
        )


def _is(value: float, number: float) -> bool:
    return math.isclose(value, number, rel_tol=_CLOSE)


def _in_an_epoch(loader: Loader) -> int:
    return loader.samples // loader.batch * loader.batch if loader.drop_last else loader.samples
