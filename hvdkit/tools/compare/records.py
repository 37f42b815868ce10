"""A rank's record of its first steps, in a file of JSON and one of arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Arrays = Mapping[str, Array]

#: Most elements of a tensor that are recorded; of a larger one every second, third, ...
KEPT = 65_536


@dataclass
class Step:
    """One step of one optimizer.

    optimizer: its number, in the order of first steps. loss: the mean of the losses that backward() was called on; None
    if it was not seen. rates: the learning rate of each group in this step. first_rates: the same before any schedule.
    rows: samples since the step before. hashes: one for each of them. random: were random numbers drawn between the
    batch and backward()? momentum: what a callback has multiplied it by since the step before. gradients: what the
    optimizer was given. parameters: what it left.
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

    number: which DataLoader, or fit(), of the script. drop_last: is a last batch that is not full left out?
    batches: what len() of it says.
    """

    number: int
    samples: int
    batch: int
    drop_last: bool
    batches: int = 0


@dataclass
class RankRecord:
    """The record of one rank.

    framework: "torch", "keras", or "" if no step was seen. batch_norm: names of layers that normalise by the batch of
    one rank. dropout: was any switched off? half: was anything computed in 16 bits? other_start: did the script begin
    with other parameters than the ranks, which were then overwritten? initial: parameters before the first step.
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
    """Write the two files of this rank; the JSON comes last, so both are complete when it exists."""
    arrays: dict[str, Array] = {f"initial/{name}": array for name, array in record.initial.items()}
    for number, step in enumerate(record.steps):
        arrays.update({f"{number}/gradients/{name}": array for name, array in step.gradients.items()})
        arrays.update({f"{number}/parameters/{name}": array for name, array in step.parameters.items()})
    with (folder / f"rank-{record.rank}.npz").open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    numbers = asdict(record)
    numbers.pop("initial")
    for step in numbers["steps"]:
        del step["gradients"], step["parameters"]
    temporary = folder / f"rank-{record.rank}.tmp"
    temporary.write_text(json.dumps(numbers))
    temporary.replace(folder / f"rank-{record.rank}.json")


def read_records(folder: Path) -> list[RankRecord]:
    """Read the records of all ranks in a folder, by rank."""
    return sorted((_read(path) for path in folder.glob("rank-*.json")), key=lambda record: record.rank)


def _read(path: Path) -> RankRecord:
    numbers = json.loads(path.read_text())
    numbers["steps"] = [Step(**step) for step in numbers["steps"]]
    numbers["loaders"] = [Loader(**loader) for loader in numbers["loaders"]]
    record = RankRecord(**numbers)
    with np.load(path.with_suffix(".npz")) as arrays:
        for key in arrays.files:
            first, _, rest = key.partition("/")
            if first == "initial":
                record.initial[rest] = arrays[key]
            else:
                kind, _, name = rest.partition("/")
                getattr(record.steps[int(first)], kind)[name] = arrays[key]
    return record
