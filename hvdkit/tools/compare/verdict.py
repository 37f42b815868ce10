"""Equal or not, and why: from the records of all runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvdkit.errors import CompareError
from hvdkit.tools.compare import causes
from hvdkit.tools.compare.causes import Cause
from hvdkit.tools.compare.differences import HALF, Difference, Limits, compare_steps, within
from hvdkit.tools.compare.records import RankRecord


@dataclass(frozen=True)
class Verdict:
    """What compare says.

    within: how far all parameters are apart at the end, as a part of their norm. first: what differs first in numbers,
    if anything does. differences: all that were looked at. notes: what else is to be known.
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
) -> Verdict:
    """Compare the run on many ranks with that on one.

    run_again: runs the script on one rank once more; called if numbers differ and chance may be why.
    wrapped: hvdkit itself shares the data and scales the learning rate, so these are not looked at.
    Raises CompareError for runs that did not do the same.
    """
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
        found += _explain(first, many, one, run_again, chosen)
    return Verdict(
        ranks=len(many),
        steps=min(len(record.steps) for record in (*many, one)),
        equal=first is None and not found,
        within=within(many[0], one),
        first=first,
        causes=found,
        differences=differences,
        notes=_notes(many, one, half),
    )


def _explain(
    first: Difference, many: Sequence[RankRecord], one: RankRecord, run_again: Callable[[], RankRecord], limits: Limits
) -> list[Cause]:
    def repeats() -> bool:
        return all(difference.equal for difference in compare_steps([run_again()], one, limits))

    return list(causes.explain(first, many, one, many[0].initial, repeats))


def _check(many: Sequence[RankRecord], one: RankRecord) -> None:
    tensors = set(many[0].steps[0].parameters)
    for record in (*many[1:], one):
        other = set(record.steps[0].parameters)
        if other != tensors:
            name = sorted(tensors ^ other)[0]
            who = "one rank alone" if record is one else f"rank {record.rank}"
            raise CompareError(
                f"Rank 0 and {who} do not train the same tensors: only one of them has {name}. Ranks with models "
                f"of their own (process sets) cannot be compared with one rank; compare each by itself."
            )
    if not any(step.rows for step in many[0].steps):
        raise CompareError(
            "The batches were not seen, so one rank cannot be given those of all. They have to come from a "
            "torch.utils.data.DataLoader, or go to keras.Model.fit."
        )


def _notes(many: Sequence[RankRecord], one: RankRecord, half: bool) -> list[str]:
    notes = ["One rank was given the batches of all ranks, and their learning rate."]
    if one.dropout or many[0].dropout:
        notes.append("Dropout was off in all runs.")
    if one.other_start:
        notes.append("The script begins with other parameters on one rank; it was given those of rank 0.")
    if half:
        notes.append("Something is computed in 16 bits, so the limits are wide.")
    return notes
