"""The verdict from the records of all runs: equal or not, and the causes; as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdkit.errors import CompareError
from hvdkit.tools.compare import causes
from hvdkit.tools.compare.causes import Cause
from hvdkit.tools.compare.records import HALF, Difference, Limits, RankRecord, compare_steps, within
from hvdkit.transport.buffer import Array

#: Largest relative difference of a gradient in one step in which an activation's input flips its sign.
_LARGEST_FLIP = 5e-2
#: Gradients of layers that the flip does not reach are equal within this relative difference.
_EQUAL = 1e-5


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    ranks: number of ranks.
    steps: number of steps.
    equal: are the runs equal?
    within: distance of all parameters after the last step, relative to their norm.
    first: the first difference beyond the tolerance.
    causes: its likely causes.
    differences: all computed differences.
    notes: remarks for the reader.
    """

    ranks: int
    steps: int
    equal: bool
    within: float
    first: Difference | None
    causes: list[Cause]
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judge(
    many: Sequence[RankRecord],
    one: RankRecord,
    run_again: Callable[[], RankRecord],
    *,
    limits: Limits | None = None,
    wrapped: bool = False,
    own_rates: bool = False,
) -> Verdict:
    """Compare the run on many ranks with the run on one.

    many: the records of the run on many ranks.
    one: the record of the run on one rank.
    run_again: runs the script on one rank once more; called to check whether it is deterministic.
    limits: tolerances; None for those of the dtype.
    wrapped: hvdkit shards the data and scales the learning rate, so neither is checked.
    own_rates: one rank kept the learning rate that the script sets on it.
    Raises CompareError for runs that cannot be compared.
    """

    def repeats() -> bool:
        return all(difference.equal for difference in compare_steps([run_again()], one, chosen))

    _check(many, one)
    half = one.half or any(record.half for record in many)
    chosen = limits or (HALF if half else Limits())
    differences = list(compare_steps(many, one, chosen))
    first = next((one for one in differences if not one.equal), None)
    found = [*causes.find_start(many)]
    found += [] if found else causes.find_drift(many)
    found += causes.find_same_samples(many)
    if not wrapped:
        shared = any(cause.name == "same-samples" for cause in found)
        found += [cause for cause in causes.find_other_epoch(many, one) if cause.name != "whole-epoch" or not shared]
        found += causes.find_scaled_rate(many, one)
    if first is not None and not any(one.name in ("no-broadcast", "not-reduced", "rates-differ") for one in found):
        found += causes.explain(first, many, one, repeats)
    steps = min(len(record.steps) for record in (*many, one))
    notes = _notes(many, one, half, own_rates)
    flipped = not found and _is_sign_flip(differences, many[0], one, steps)
    if flipped and first is not None:
        notes.append(
            f"Gradients differ in step {first.step + 1} only, most of all those of {first.tensor}; losses, parameters "
            "and the gradients of other layers are equal: the input of a ReLU or a maximum that is almost zero changed "
            "its sign by rounding."
        )
    return Verdict(
        ranks=len(many),
        steps=steps,
        equal=(first is None or flipped) and not found,
        within=within(many[0], one),
        first=first,
        causes=found,
        differences=differences,
        notes=notes,
    )


def _is_sign_flip(differences: Sequence[Difference], many: RankRecord, one: RankRecord, steps: int) -> bool:
    """Do gradients differ a little in one step, and nothing else then or later, as if a ReLU's input flipped its sign?

    A ReLU's derivative jumps at zero, so rounding of the input decides. In the layer before the ReLU a few elements
    differ; the layers behind it have equal gradients. A wrong divisor, clipping or a lost sample change all elements of
    a layer, or all layers.
    """
    unequal = [each for each in differences if not each.equal]
    only = unequal[0] if len(unequal) == 1 else None
    if only is None or only.what != "gradients" or only.size > _LARGEST_FLIP or only.step >= steps - 1:
        return False
    mine, alone = many.steps[only.step].gradients, one.steps[only.step].gradients
    if mine.keys() != alone.keys():
        return False
    compared = [(np.square(mine[name] - value), np.square(value).sum()) for name, value in alone.items() if value.any()]
    unequal_parts = [part for part, whole in compared if part.sum() > _EQUAL**2 * whole]
    return len(unequal_parts) < len(compared) and any(map(_lies_in_few, unequal_parts))


def _lies_in_few(part: Array) -> bool:
    """Do a tenth of the elements have 90 % of the sum?"""
    largest = np.sort(part, axis=None)[part.size - part.size // 10 :]
    return bool(largest.sum() >= 0.9 * part.sum())


def _check(many: Sequence[RankRecord], one: RankRecord) -> None:
    tensors = set(many[0].steps[0].parameters)
    for record in (*many[1:], one):
        other = set(record.steps[0].parameters)
        if other != tensors:
            name = sorted(tensors ^ other)[0]
            who = "one rank alone" if record is one else f"rank {record.rank}"
            raise CompareError(
                f"Rank 0 and {who} train different tensors: only one of them has {name}. Ranks that train different "
                f"models (process sets) cannot be compared with one rank. Compare each model by itself."
            )
    if not any(step.rows for step in many[0].steps):
        raise CompareError(
            "No batches were recorded, so one rank cannot train on the batches of all ranks. Take the batches from a "
            "torch.utils.data.DataLoader, or pass them to keras.Model.fit()."
        )


def _notes(many: Sequence[RankRecord], one: RankRecord, half: bool, own_rates: bool) -> list[str]:
    rate = "kept the learning rate of the script" if own_rates else "used the learning rate of the several ranks"
    notes = [f"One rank trained on the batches of all ranks, and {rate}."]
    if one.dropout or many[0].dropout:
        notes.append("Dropout was off in all runs.")
    if one.other_start:
        notes.append(
            "The script starts with different parameters on one rank; these were replaced with those of rank 0."
        )
    if half:
        notes.append("Some values are float16 or bfloat16, so the tolerance is larger.")
    return notes


_KINDS = ("loss", "gradients", "parameters")


def show_json(verdict: Verdict) -> str:
    """Encode the verdict as JSON."""
    return json.dumps({"verdict": "equal" if verdict.equal else "different", **asdict(verdict)}, indent=2)


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Print a table of differences, notes, causes, and the verdict in a sentence."""
    console.print(_build_table(verdict))
    for note in verdict.notes:
        console.print(escape(note), style="dim", highlight=False)
    for cause in verdict.causes:
        console.print(f"[bold red]{cause.name}[/]: {escape(cause.seen)}.", highlight=False)
        console.print(f"    {escape(cause.cure)}", highlight=False)
    console.print(
        ("[bold green]" if verdict.equal else "[bold red]") + escape(summarise(verdict)) + "[/]", highlight=False
    )


def summarise(verdict: Verdict) -> str:
    """Write the verdict as a sentence."""
    steps = f"{verdict.steps} step{'s' * (verdict.steps > 1)}"
    if verdict.equal:
        return (
            f"The same training: after {steps} on {verdict.ranks} ranks and on one, parameters are equal within "
            f"{verdict.within:.1e}."
        )
    why = " and ".join(cause.name for cause in verdict.causes)
    if verdict.first is None:
        return f"Not the same training ({why}), though the same batches give the same parameters in {steps}."
    tensor = f" of {verdict.first.tensor}" if verdict.first.tensor else ""
    seen = f"the first difference is in step {verdict.first.step + 1}: {verdict.first.what}{tensor}"
    return f"Not the same training: {seen}, by {verdict.first.size:.1e}; " + (
        f"likely cause: {why}." if why else "cause unknown."
    )


def _build_table(verdict: Verdict) -> Table:
    table = Table(title=f"{verdict.ranks} ranks and 1 rank, with the same batches", title_justify="left", box=SIMPLE)
    table.add_column("step", justify="right")
    for kind in _KINDS:
        table.add_column(kind)
    for number in range(verdict.steps):
        row = []
        for kind in _KINDS:
            rows = [one for one in verdict.differences if one.step == number and one.what == kind]
            style = "" if not rows or rows[0].equal else "red"
            text = "-" if not rows else f"{rows[0].size:.1e}"
            name = f" {escape(rows[0].tensor)}" if rows and rows[0].tensor and not rows[0].equal else ""
            row.append(f"[{style}]{text}{name}[/]" if style else text)
        table.add_row(str(number + 1), *row)
    return table
