"""The recordings of a job's ranks as arrays, and their file format."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.engine.observe.recording import PlanFacts, RankFacts, Rounds
from hvdkit.errors import ProfileError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RankRecording:
    """The recording of a rank. plans: each with a row for each round, (rounds, facts.row); see observe/recording.py."""

    facts: RankFacts
    plans: list[tuple[PlanFacts, Floats]] = field(default_factory=list)


def as_rows(facts: PlanFacts, data: bytes) -> Floats:
    """Convert the bytes of rounds from a recorder to rows, (rounds, facts.row)."""
    return np.frombuffer(data, np.float64).reshape(-1, facts.row)


def as_recording(facts: RankFacts, plans: Sequence[Rounds]) -> RankRecording:
    """Convert the rounds of each plan in a rank's recorder to arrays."""
    return RankRecording(facts, [(plan.facts, as_rows(plan.facts, b"".join(plan.rows))) for plan in plans])


def parse_facts(facts: Mapping[str, Any]) -> RankFacts:
    """Convert a JSON object to RankFacts."""
    link = facts["link"]
    return RankFacts(**{**facts, "link": None if link is None else tuple(link)})


def parse_plan(facts: Mapping[str, Any]) -> PlanFacts:
    """Convert a JSON object to PlanFacts."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    return PlanFacts(**fields)


def write_recordings(recordings: Sequence[RankRecording], path: Path) -> None:
    """Write recordings to a file of numpy's .npz format, whatever its name."""
    arrays: dict[str, Any] = {}
    about = []
    for number, recording in enumerate(recordings):
        about.append({"facts": asdict(recording.facts), "plans": [asdict(facts) for facts, _ in recording.plans]})
        arrays.update({f"{number}/{at}": rows for at, (_, rows) in enumerate(recording.plans)})
    with path.open("wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)


def read_recordings(path: Path) -> list[RankRecording]:
    """Read a file of write_recordings(). Raises ProfileError for any other file."""
    try:
        with np.load(path) as arrays:
            return [
                RankRecording(
                    parse_facts(rank["facts"]),
                    [(parse_plan(facts), arrays[f"{number}/{at}"]) for at, facts in enumerate(rank["plans"])],
                )
                for number, rank in enumerate(json.loads(str(arrays["about"])))
            ]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ProfileError(f"{path} is not a recording: {error}. `hvdkit profile --save FILE` writes one.") from None
