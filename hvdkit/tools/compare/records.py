"""A rank's record of its first steps, in a file; and the distances between two runs."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Arrays = Mapping[str, Array]

#: Most elements of a tensor that are recorded; of a larger tensor every second, third, ... is recorded.
KEPT = 65_536


@dataclass
class Step:
    """One step of one optimizer.

    optimizer: its number, in the order of first steps.
    loss: the mean of the losses on which backward() was called; None if none was seen.
    rates: the learning rate of each group in this step.
    first_rates: the learning rates before any schedule.
    rows: number of samples since the previous step.
    hashes: a hash of each of these samples.
    random: were random numbers drawn between the batch and backward()?
    momentum: factor by which a callback has multiplied the momentum since the previous step.
    gradients: the gradients that the optimizer received.
    parameters: the parameters after the step.
    """

    optimizer: int
    loss: float | None
    rates: list[float]
    first_rates: list[float]
    rows: int
    hashes: list[str]
    random: bool = False
    momentum: float = 1.0
    gradients: dict[str, Array] = field(default_factory=dict)
    parameters: dict[str, Array] = field(default_factory=dict)


@dataclass
class Loader:
    """A source of training batches: its samples in an epoch, and the size of its batches.

    number: number of the DataLoader, or fit(), in the script.
    samples: number of samples.
    batch: samples of a batch.
    drop_last: is an incomplete last batch left out?
    batches: its len().
    """

    number: int
    samples: int
    batch: int
    drop_last: bool
    batches: int = 0


@dataclass
class RankRecord:
    """The record of one rank.

    rank, size: the rank, and the number of ranks.
    framework: "torch", "keras", or "" if no step was seen.
    batch_norm: names of layers that normalise by the batch of one rank.
    dropout: was any dropout switched off?
    half: was anything computed in 16 bits?
    other_start: did the script begin with parameters other than the ranks', which then replaced them?
    loaders: its sources of batches.
    initial: parameters before the first step.
    steps: its steps.
    """

    rank: int
    size: int
    framework: str = ""
    batch_norm: list[str] = field(default_factory=list)
    dropout: bool = False
    half: bool = False
    other_start: bool = False
    loaders: list[Loader] = field(default_factory=list)
    initial: dict[str, Array] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


def thin(values: Any) -> Array:
    """Select the elements of a tensor that are recorded, as float64, (n,)."""
    flat = np.asarray(values).reshape(-1)
    return flat[:: -(-flat.size // KEPT) or 1].astype(np.float64)


def write_record(record: RankRecord, folder: Path) -> None:
    """Write the record of this rank; it is complete once its file has the name that `read_records` expects."""
    temporary = folder / f"rank-{record.rank}.tmp"
    temporary.write_bytes(pickle.dumps(record))
    temporary.replace(folder / f"rank-{record.rank}.pickle")


def read_records(folder: Path) -> list[RankRecord]:
    """Read the records of all ranks in a folder, by rank."""
    records: list[RankRecord] = [pickle.loads(path.read_bytes()) for path in folder.glob("rank-*.pickle")]
    return sorted(records, key=lambda record: record.rank)


#: Rounding of float32, relative to a tensor's norm, that one step may add to it.
_ROUNDING = 4e-7


@dataclass(frozen=True)
class Limits:
    """Tolerances: of losses relative to the loss, of gradients to their norm, of parameters to their movement.

    Parameters have a larger tolerance: where a gradient is nearly zero, an optimizer that divides by its size takes a
    step of the size of its rounding.
    """

    loss: float = 1e-4
    gradients: float = 2e-3
    parameters: float = 2e-2


#: Tolerances if some values are computed in 16 bits.
HALF = Limits(3e-2, 1e-1, 3e-1)


@dataclass(frozen=True)
class Difference:
    """A difference in a step.

    step: its number.
    what: "loss", "gradients" or "parameters".
    tensor: name of the tensor; "" for a loss.
    size: the relative difference.
    equal: is it within the tolerance?
    """

    step: int
    what: str
    tensor: str
    size: float
    equal: bool


def loss_of(steps: Sequence[Step]) -> float | None:
    """Average the losses of all ranks in a step, weighted by their rows."""
    losses = [step.loss for step in steps]
    if any(loss is None for loss in losses):
        return None
    weights = [step.rows for step in steps] if any(step.rows for step in steps) else [1] * len(steps)
    return float(np.average([loss for loss in losses if loss is not None], weights=weights))


def compare_steps(many: Sequence[RankRecord], one: RankRecord, limits: Limits) -> Iterator[Difference]:
    """Yield the largest difference of each kind in each step, in the order in which a step computes them."""
    start = many[0].initial
    for number, (mine, alone) in enumerate(zip(zip(*(r.steps for r in many), strict=False), one.steps, strict=False)):
        loss = loss_of(mine)
        if loss is not None and alone.loss is not None:
            size = abs(loss - alone.loss) / max(abs(alone.loss), 1e-6)
            yield Difference(number, "loss", "", size, size <= limits.loss)
        if mine[0].gradients and alone.gradients:
            tensor, size = _largest(mine[0].gradients, alone.gradients, {})
            yield Difference(number, "gradients", tensor, size, size <= limits.gradients)
        tensor, size = _largest(mine[0].parameters, alone.parameters, start, rounding=_ROUNDING * (number + 1))
        yield Difference(number, "parameters", tensor, size, size <= limits.parameters)


def apart(ones: Arrays, others: Arrays) -> tuple[str, float]:
    """Find the tensor in which two ranks differ most, and the distance over its norm; ("", 0) if all bits are equal."""
    both = [name for name in ones if name in others]
    found = [(_norm(ones[name] - others[name]) / max(_norm(ones[name]), 1e-30), name) for name in both]
    size, name = max(found, default=(0.0, ""))
    return (name, size) if size else ("", 0.0)


def within(many: RankRecord, one: RankRecord) -> float:
    """Return the distance of all parameters after the last common step, over their norm."""
    last = min(len(many.steps), len(one.steps)) - 1
    mine, alone = many.steps[last].parameters, one.steps[last].parameters
    distance = sum(_norm(mine[name] - alone[name]) ** 2 for name in alone)
    return float(np.sqrt(distance / max(sum(_norm(value) ** 2 for value in alone.values()), 1e-30)))


def ratio(ones: Arrays, others: Arrays) -> tuple[float, float]:
    """Return (r, cosine) of the best fit `ones` = r * `others`."""
    names = sorted(set(ones) & set(others))
    one = np.concatenate([ones[name] for name in names] or [np.zeros(1)])
    other = np.concatenate([others[name] for name in names] or [np.zeros(1)])
    dot, square = float(one @ other), float(other @ other)
    if not square or not one.any():
        return 1.0, 1.0
    return dot / square, dot / float(np.linalg.norm(one) * np.linalg.norm(other))


def _largest(ones: Arrays, others: Arrays, start: Arrays, rounding: float = 0.0) -> tuple[str, float]:
    """Find the tensor with the largest distance, relative to its movement from its start (zero if it has none).

    The divisor is at least a tenth of the movement of all tensors: in small tensors, rounding at a kink of an
    activation is visible.
    """
    moved = {name: _norm(value - start.get(name, np.zeros(1))) for name, value in others.items()}
    least = 0.1 * float(np.sqrt(sum(size**2 for size in moved.values()))) or 1e-30
    found = []
    for name, value in others.items():
        if name in ones:
            distance = max(0.0, _norm(ones[name] - value) - rounding * _norm(value))
            found.append((distance / max(moved[name], least), name))
    size, name = max(found, default=(0.0, ""))
    return name, size


def _norm(value: Array) -> float:
    return float(np.linalg.norm(value))
